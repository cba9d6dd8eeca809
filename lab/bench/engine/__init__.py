"""The parts of scripts/bench.py engine.

Files:
    cases    The requests of the engine benchmark: prompts that every server tokenizes alike
    cells    Stores measured cells on disk immediately
    command  Our engine against llama.cpp, vLLM's CPU build and `transformers serve`: the embedded model
    floors   The machine's ceilings measured with torch in the same run
    run      Runs the servers case by case: they alternate within every round
    servers  The servers of the engine benchmark: how each is started, paused and stopped
    verdict  Computes lines from cells: one number per metric and server, its share of the floor
"""
