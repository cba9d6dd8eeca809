"""The parts of scripts/bench.py engine.

Files:
    cases    The requests of the engine benchmark: prompts that every server tokenizes alike, and its cases
    cells    Stores measured cells on disk immediately, so that an interrupted benchmark continues where it stopped
    command  Our engine against llama.cpp, vLLM's CPU build and `transformers serve`: the embedded model, two cores,
             one run
    floors   The machine's ceilings measured with torch in the same run, and the minimum step time that they imply
    run      Runs the servers case by case: they alternate within every round, and all except one are paused
    servers  The servers of the engine benchmark except vLLM (lab/foreign/vllm/server.py): the command of each
    shares   Use of the machine by our server: bytes per token against the floor, and shares of the measured rates, by
             case
    verdict  Computes lines from cells: one number per metric and server, its share of the floor, its ratio and goal
             per peer
"""
