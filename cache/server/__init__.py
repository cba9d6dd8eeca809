"""Answers peers that use this node's share of the pooled store.

Files:
    bulk_answers  BulkShare: peers' questions over data connections for blocks of this node's share
    lasting       Answers peers that need more than a slot in memory: durability
    leases        Which slots of this node's share each peer may read or write now
    server        StoreServer: the serving half of the pooled store
"""
