"""Which KV is kept, where, and for how long.

Files:
    answer_checks  The checks of a home's answer against the keys of the question
    arena          One large region divided into equal slots, one block each
    block          Block geometry: the layout of one unit of KV
    block_copy     Copies blocks and computes their checksums in one C call and in one pass over the bytes
    bulk_messages  The bulk calls for pooled blocks: their kinds and bodies
    checked_copy   Copies blocks from memory that others may change, and computes the checksum of the copy
    copy_threads   A few threads that copy blocks in parallel, for a caller on the event loop
    groups         Layers whose KV has one geometry and one rule of what a later request needs
    keys.c         The chained keys of a prompt's blocks: key = BLAKE2b-128(parent key | token ids), RFC 7693, without
                   a secret
    keys           The keys of blocks: a 128-bit chained hash, root -> parent key -> token ids
    layer_groups   Layers in groups with a block table each: layers that see all tokens or a window, and layers with a
                   state
    messages       The messages of nodes about pooled blocks: their kinds and their bodies
    offer          The facts that a writer sends about blocks in addition to their keys
    protocol       The common parts of questions and answers about pooled blocks: answer codes, deadlines, keys on the
                   wire
    recent         A bounded memory of keys
    results        The results and errors of calls to the store
    ssd_reads      Predicts how long blocks on SSD take to reach DRAM, fitted to this node's reads and including
                   queued ones
    stable_marks   Words in shared memory that say whether the memory of a running put is unchanged
    staging        Memory for values between the pool and callers without an arena, and for KV blocks that are encoded
                   for the transfer
    tenants        Tenants of the pool: a key of named values begins with the space of its tenant, so the key tells
                   whose it is
    homes/         Decides which node keeps a key, which home is asked next, and which of two contents stays
    index/         The locations of blocks in DRAM, readable by other processes of the host
    named/         Values and tensors under names of any length, as programs put them and nodes read them
    pool/          Decides who uses which slot of an arena, and which content stays
    quick/         Gets and puts of a thread that waits for them: no event loop, no switch of threads
    server/        Answers peers that use this node's share of the pooled store
    sessions/      KV of sessions between their turns, at the home of the blocks
    sites/         Blocks that cross from one site to another: a budget for the link, copies by the rules of a CDN,
                   the pools of others
    ssd/           The SSD tier: blocks on disk under a byte budget, found again after a restart
    store/         The pooled store as one node or program uses it
    tiers/         One node's share of the pooled store: DRAM first, SSD behind it
"""
