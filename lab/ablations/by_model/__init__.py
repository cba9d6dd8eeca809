"""Ablations by the groups of a model's KV: several models on the same nodes, by formula.

Files:
    cache    The size of the cache that a model needs, and the distance between pooled states
    network  The network that a model needs for found prefixes and hand-overs
    sized    The models, their nodes, and a load that suits each of them
    split    The split of the nodes into prefill and decode nodes
"""
