"""Upstream's mooncake.store on our pool.

Files:
    arguments          Checks of the arguments of engines' calls
    client             The entry of one MooncakeDistributedStore to the pool, and the event loop on which it lives
    codes              The codes that upstream's calls answer, as far as ours do
    distributed_store  MooncakeDistributedStore: upstream's store calls, answered by our pool
    named_values       Values of any size under names of any length, in the pool of one tenant
    nodes              Finds the node through which a program enters the pool: named by the program, running on this
                       host, or started
    quick_values       Puts and gets of named values in the calling thread (cache/quick/), as far as that is possible
    registered         The memory that a program has registered
    replicas           The answers of upstream's replica descriptions, for a value of our pool
    replicate_config   The wishes of one put
    sessions           Several values that are read or written in ranges, layer by layer, with one entry each
    settings           The settings that engines give: setup's arguments in all their forms, and MooncakeConfig
    tensor_calls       Upstream's calls for torch's tensors
    tensor_memory      torch's tensors as values of the pool, and back
"""
