"""The store for a long time, under load and under faults.

Files:
    command  The store under load and under faults, for a given time
    holders  A client's view while a holder of its values is killed or hangs: the longest get, and wrong bytes
    load     Mixed load on three store nodes: values, objects, removals, and a client that reconnects
    tier     An SSD tier that writes in a separate process until it is killed; and faults for it: SIGKILL, flipped
             bits
"""
