"""Ablations of the nodes themselves: how many there are over time, what unlike ones cost, and where they are.

Files:
    autoscaling    A load that doubles and halves: nodes that start and leave, against fixed numbers of nodes
    expert_copies  Copies of experts against losses of ranks: nodes whose GPUs share the experts of a model, under
                   load
    fat_tree       NetKV on a fat tree of 64 GPUs: what the choice of the decode node by distance and load of the
                   links saves
    prices         Cheap and slow nodes with dear and fast ones: placement by cost, against placement by time alone
    sessions       Parked or least recently used: the KV of agents and people between their turns, by the DRAM of the
                   pool
    sites          When does a KV CDN pay?
"""
