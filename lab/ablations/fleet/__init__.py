"""Ablations of the nodes themselves: how many there are over time, and what unlike ones cost.

Files:
    autoscaling  A load that doubles and halves: nodes that start and leave, against fixed numbers of nodes
    prices       Cheap and slow nodes with dear and fast ones: placement by cost, against placement by time alone
"""
