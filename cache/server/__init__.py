"""What a node answers to peers that use its share of the pooled store.

Files:
    bulk_answers  BulkShare: peers' questions over data connections for blocks of this node's share
    lasting       Answers peers who want more than a place in memory for blocks of this node's share
    leases        Which slots of this node's share which peer may read or write now
    server        StoreServer: the serving half of the pooled store
"""
