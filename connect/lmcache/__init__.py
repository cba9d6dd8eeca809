"""LMCache on our pool.

Files:
    chunks  LMCache's chunks in the pool: their names, and what stands before their bytes
    l2      MooncakeL2: our pool as the second level of LMCache's server process
    remote  MooncakeConnector: our pool as the remote storage of LMCache inside an engine
"""
