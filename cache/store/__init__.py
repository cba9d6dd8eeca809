"""The pooled store as one node or program uses it.

Files:
    accounts     What one client's calls of the pooled store have moved, and from where
    bulk_get     The question for blocks of one home whose answer has them, received where they belong
    bulk_put     Blocks sent to one home with the question to take them, straight into its slots
    bulk_reader  The way of a get to homes that are reached over TCP: one question per piece
    calls        The asking half of the pooled store's messages
    client       The pooled store for programs without an event loop
    job          StoreCall: one get or put as its parts see it, and what both directions share: spans, pieces
    keeper       Brings blocks to where they belong while the store serves: after joins and losses
    layered      A get in two halves: everything is pinned at its homes first, then it is read part by part
    objects      Named bytes of any size in the pooled store: weights, adapters, anything
    options      How a Store keeps blocks and moves them
    reader       The way of a lookup and of a get through the homes: pin, read, check
    remote       The pooled store for a process that is no node of the cluster: scripts, loaders, benchmarks
    same_host    Gets and lookups at homes on this host without a word to them
    staging      Memory that values pass through on their way between the pool and callers who have no arena of their
                 own
    store        The pooled store over the DRAM and SSD of all nodes, as one node uses it
    streaming    A long prefix in windows, so that its reader works on one while the next is on its way
    values       Single values as bytes, for callers without an arena
    writer       The way of a put through the homes: reserve, write, commit
"""
