"""Answers peers that use this node's share of the pooled store.

Files:
    bulk_answers  BulkShare: answers store.get and store.put of peers over data connections
    lasting       Answers peers that need more than a slot in memory: durability
    leases        Which slots of this node's share each peer may read or write now
    server        StoreServer: the serving half of the pooled store
"""
