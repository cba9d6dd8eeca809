"""Builds a runner over an empty KV arena from a model source.

Files:
    cuda_memory     The KV arena in GPU memory as a device of transfers (net/transfer/device/staging.py): copies use a
                    separate stream
    load_model      Builds a runner over an empty KV arena from a model source and a Config
    new_weights     Builds a runner with other weights over the arena of a running one
    offload_model   Builds a model whose weights exceed the memory that they may use
    rank_arenas     KV arenas of ranks on several GPUs: each rank has its KV heads on its own GPU, and rank 0 sees all
                    of them
    rank_processes  Rank 0's side of tensor parallelism
    rank_worker     The process of a tensor-parallel rank above 0: it loads a shard, then computes every step that
                    rank 0 sends
    shared_memory   Memory of this node that peers on this host may map: the kernel's refusal names the flag
    split_arena     A KV arena in parts, one per tensor-parallel rank, seen as one arena of whole blocks
    split_memory    An arena whose parts are on several GPUs, as one device of transfers
    weight_type     Decides what --weight-dtype auto means for one model on this machine: `stored` or `wide`, with the
                    reason in the log
"""
