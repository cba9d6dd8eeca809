"""One node's share of the pooled store: DRAM first, SSD behind it.

Files:
    granting      Which of the blocks that writers offer get a slot of a LocalStore
    group_sync    Everybody who waits for the disk shares its next sync
    kept          Blocks of a LocalStore that are never evicted, up to a limit: what programs pinned
    local_store   One node's share of the pooled store
    pinning       Blocks of a LocalStore kept where they are while somebody reads them
    promotion     Promotions: blocks on their way from SSD into slots of DRAM
    reservations  Slots on their way to being blocks, which enter in two steps: their bytes arrive in between
    slots         DramSlots: length, checksum and facts of what lies in each slot of an arena
    write_behind  Blocks of the DRAM tier on their way to SSD, in the order they were committed
"""
