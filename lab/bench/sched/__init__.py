"""The parts of scripts/bench.py sched, one question each.

Files:
    accept    The number of requests that one core accepts, without a network
    command   The cost of the scheduler: placement decisions, block keys, the accept path
    decision  The time of one placement with given hashes
"""
