"""What nodes tell each other of their load and of what they hold. Pure.

Files:
    cells            Above a few hundred nodes, records and digests stay within a cell
    core             One node's complete gossip: membership, load records
    digest           The set of keys that a node holds, in 12 bits per key: a cuckoo filter
    digest_exchange  Anti-entropy of cache digests: a node with an old state gets the missing deltas
    elsewhere        Chooses nodes to ask in another cell
    exchange         Anti-entropy of node records by version vector; every packet is self-contained
    holders          Finds the holders of a prefix in the digests of all nodes: the depth of a key chain per node
    intents          Records which node is computing a prefix
    load_word        The load word: the 64 bytes in which a node publishes its load
    record           The node record: the load of one node in 92 bytes of fixed layout, one row of a numpy array
    state            What this node knows of all nodes' load: a table with the newest record of each member
"""
