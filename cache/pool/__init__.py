"""Decides who uses which slot of an arena, and which content stays. Pure.

Files:
    admission   Which blocks a full pool accepts at the cost of evicting another
    aside       Content that a pool evicts before all other, because it is known to be wanted late or never
    block_pool  Which slots of an arena are in use, and what content the unused slots still have
    borders     Block borders at which a prompt can go on with what another node holds, as far as its digest tells
    policy      The interface of eviction policies, and LRU, the default
    prefix      PrefixIndex: maps keys to blocks and finds the longest cached prefix of a prompt
    policies/   Eviction policies: the order in which cached content is evicted
"""
