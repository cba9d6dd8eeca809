"""The parts of scripts/bench.py engine.

Files:
    cases    What the engine benchmark sends: prompts that every server reads alike
    cells    Measured cells, kept on disk as they come
    command  Our engine beside vLLM's CPU build and `transformers serve`: the embedded model, two cores
    floors   The machine's ceilings by torch, measured in the run
    run      One server after another, case by case: all of them alternate within every round
    servers  The servers of the engine benchmark: how each is started, told to pause, and stopped
    verdict  From cells to lines: one number per metric and server, its share of the floor
"""
