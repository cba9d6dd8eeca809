"""What KV is kept, where, and for how long.

Files:
    answer_checks  What an answer of a home must hold true for the keys that it was asked about
    arena          One large region cut into equal slots, one block each
    block          Block geometry and block keys: what one unit of KV is, and how content names it
    bulk_messages  The bulk calls for pooled blocks: their kinds and bodies
    checked_copy   Copies blocks out of memory that others may change, and computes the checksum of the copy
    copy_threads   Threads that copy blocks, a few at once, for a caller on the event loop
    keys.c         The chained keys of a prompt's blocks: key = BLAKE2b-128(parent key | token ids), RFC 7693
    keys           The keys of a prompt's blocks in one call: keys.c
    messages       What nodes tell each other about pooled blocks: the kinds of messages and their bodies
    offer          What a writer says of blocks in addition to their keys, as it travels
    protocol       What both halves of the pooled store's messages agree on: answers instead of a slot
    recent         A bounded memory of keys
    results        What calls of the store return and raise
    ssd_reads      How long blocks on SSD take to come into DRAM: fitted to this node's own reads
    homes/         Which node keeps a key, which home is asked next, and which of two contents stays
    index/         Where blocks lie in DRAM, readable by the other processes of the host
    pool/          Who uses which slot of an arena, and which content stays
    server/        What a node answers to peers that use its share of the pooled store
    ssd/           The SSD tier: blocks on disk under a byte budget, found again after a restart
    store/         The pooled store as one node or program uses it
    tiers/         One node's share of the pooled store: DRAM first, SSD behind it
"""
