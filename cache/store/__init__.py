"""The pooled store as one node or program uses it.

Files:
    accounts     The bytes that one client's calls of the pooled store have moved, by source
    bulk_get     Asks one home for blocks and receives the answer directly in their destination
    bulk_put     Sends blocks to one home together with the request to store them, directly into its slots
    bulk_reader  Gets from homes over TCP: one question per piece, whose answer contains the blocks
    calls        The asking half of the pooled store's messages
    client       The pooled store for programs without an event loop
    job          StoreCall: the state of one get or put, and the parts common to both directions: spans, pieces,
                 checksums
    keeper       Moves blocks to their homes while the store serves: after joins and losses, after failures, and when
                 hot
    layered      A get in two steps: it pins all blocks at their homes, then reads the same part of all blocks before
                 the next part
    near_put     Puts to homes on this host, which copy the blocks from this process's memory
    objects      Named bytes of any size in the pooled store: weights, adapters, anything
    options      How a Store keeps blocks and moves them
    reader       Runs a lookup or a get through the homes: pin, read, check, and continue at the next replica
    remote       The pooled store for a process outside the cluster: scripts, loaders, benchmarks
    same_host    Gets and lookups at homes on this host without sending a message
    scattered    Blocks between the pool and memory that callers copy themselves, so that a block may lie in many
                 pieces
    store        The pooled store over the DRAM and SSD of all nodes, as one node uses it
    streaming    Reads a long prefix in windows, so that the caller uses one while the next one arrives
    values       Single values as bytes, for callers without an arena
    writer       Runs a put through the homes: reserve, write, commit, and continue at the next member if one fails
"""
