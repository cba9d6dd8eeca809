"""The parts of scripts/bench.py sched, one question each.

Files:
    accept    How many requests one core accepts
    command   What the scheduler costs: placement decisions, block keys, the accept path
    decision  How long one placement takes, hashes given: match the digests, score all nodes
"""
