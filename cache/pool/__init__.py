"""Who uses which slot of an arena, and which content stays. Pure.

Files:
    admission   Which blocks a full pool takes at the price of another
    block_pool  Which slots of an arena are in use, and which content the unused slots still have
    policy      What a pool or a tier asks of its eviction policy, and LRU, the default
    prefix      PrefixIndex: maps keys to blocks and finds the longest cached prefix of a prompt
    policies/   Eviction policies: in which order cached content goes
"""
