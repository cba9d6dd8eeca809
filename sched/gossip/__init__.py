"""The load and the blocks that nodes report to each other. Pure.

Files:
    cells            Above a few hundred nodes, records and digests stay within a cell, and other cells get a summary
    core             One node's complete gossip: membership, load records, cache digests and cells behind one `handle`
    digest           The set of keys that a node holds, in 12 bits per key: a cuckoo filter, sent as full pages or
                     changed slots
    digest_exchange  Anti-entropy of cache digests: a node with an old state gets the missing deltas, or a full copy
                     after a gap
    exchange         Anti-entropy of node records by version vector; every packet is self-contained
    holders          Finds the holders of a prefix in the digests of all nodes: the depth of a key chain per node, in
                     microseconds
    intents          Records which node is computing a prefix, so that a burst of requests with the same new prefix
                     computes it once
    load_word        The load word: the 64 bytes in which a node publishes its load, and the counters of claims next
                     to it
    other_cells      Chooses nodes to ask in another cell
    record           The node record: the load of one node in 92 bytes of fixed layout, one row of a numpy array
    state            The load of all nodes as this node knows it: a table with the newest record of each member,
                     merged packet by packet
"""
