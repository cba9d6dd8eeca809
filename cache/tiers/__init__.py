"""One node's share of the pooled store: DRAM first, SSD behind it.

Files:
    granting      Which of the blocks that writers offer get a slot of a LocalStore, and the answers for the others
    group_sync    All callers that wait for the disk share its next sync
    inspection    Blocks that readers reported as damaged
    kept          Blocks of a LocalStore that programs pinned (`pin=True`) and that are never evicted, up to a limit
    local_store   One node's share of the pooled store
    lodging       Slots in the DRAM of a LocalStore, and blocks on its SSD, that stay until their owner gives them up
    pinning       Holds blocks of a LocalStore in place while they are read
    promotion     Promotions: read blocks from SSD into DRAM slots, in separate threads
    reservations  Slots whose blocks are being written
    slots         DramSlots: length, checksum and facts of the block in each slot of an arena, and the index for
                  readers on this host
    usage         The blocks of each tenant in one node's share of the pool, and which tenant has reached its quota
    write_behind  Writes blocks of the DRAM tier to SSD, in the order in which they were committed
"""
