"""What nodes tell each other of their load and of what they hold. Pure.

Files:
    cells            Above a few hundred nodes, records and digests stay within a cell
    core             One node's gossip as a whole: membership, load records
    digest           Which keys a node holds, in 12 bits a key
    digest_exchange  Anti-entropy of cache digests: who is behind gets the deltas it lacks
    elsewhere        Chooses nodes to ask in another cell
    exchange         Anti-entropy of node records by version vector, each packet complete in itself
    holders          Who holds a prefix, as far as the digests of all nodes tell
    intents          Who is computing a prefix just now, so that a burst of one new prefix is computed once
    load_word        The load word: the 64 bytes in which a node publishes its load
    record           The node record: what one node tells of its load, 92 bytes of fixed layout
    state            What this node knows of all nodes' load: a table with the newest record of each member
"""
