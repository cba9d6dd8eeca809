"""Answers peers that use this node's share of the pooled store.

Files:
    bulk_answers  BulkShare: peers' questions over data connections for blocks of this node's share: GET and PUT
    lasting       Answers peers that need more than a slot in memory: durability, pins and flushes of this node's
                  blocks
    leases        Which slots of this node's share each peer may read or write now, and when the slots are released
    lending       Slots of this node's share that processes on this host fill on their own
    listing       Answers peers that look for blocks by the first bytes of their keys
    peer_regions  The regions of peers on this host, as mapped into this process
    server        StoreServer: the serving half of the pooled store
    taking        Puts of processes on this host
"""
