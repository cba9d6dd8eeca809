"""Nodes for a long time, under load and under faults.

Files:
    busy_ranks  Ranks with experts on busy cores for a given time, without a fault: no rank may be masked
    churn       Many nodes for a long time, of which some end and others begin, under an open load: nothing is lost,
                nothing grows
    command     The store under load and under faults, for a given time
    flatness    Whether a measured quantity stays flat: its robust growth over the second half of a run
    holders     A client's view while a holder of its values is killed or hangs: the longest get, and wrong bytes
    load        Mixed load on three store nodes: values, objects, removals, and a client that reconnects
    open_load   An open load: requests arrive at random times at a given rate, however long the answers take
    processes   The holdings of a process, as the kernel counts them: memory, open files, threads, shared segments
    tier        An SSD tier that writes in a separate process until it is killed; and faults for it: SIGKILL, flipped
                bits
    turns       Which nodes end in each turn of a churn, how, and what begins in their place: drawn by a seed
"""
