"""The parts of scripts/bench.py sched, one question each, and scripts/bench.py simulator.

Files:
    accept     The number of requests that one core accepts, without a network
    command    The cost of the scheduler: placement decisions, block keys, the accept path
    decision   The time of one placement with given hashes
    simulator  The simulator at scale: seconds, peak memory and events of a run on one core, for clusters of several
               sizes
"""
