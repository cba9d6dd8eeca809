"""Ablations of the nodes themselves: how many there are over time, what unlike ones cost, and where they are.

Files:
    autoscaling  A load that doubles and halves: nodes that start and leave, against fixed numbers of nodes
    prices       Cheap and slow nodes with dear and fast ones: placement by cost, against placement by time alone
    sessions     Parked or least recently used: the KV of agents and people between their turns, by the DRAM of the
                 pool
    sites        When does a KV CDN pay?
"""
