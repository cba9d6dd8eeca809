"""Which requests compute how many tokens in the next step, and the loop that computes them.

Files:
    batcher        Token-budget batching: decides which requests compute how many tokens in the next step
    calibration    A few steps before the first request, so that estimates are this machine's from the start
    costs          What this node's steps cost, learnt from the steps themselves
    engine_load    How busy the engine of this node is: what gossip, load words and probes tell of it
    kv_ready       Which bytes of a prompt's KV may leave for the decode node, and when
    kv_transfer    One prompt's KV on its way from the prefill node to the decode node
    layered_load   A prefix that arrives layer by layer while the engine computes with it
    prefix_loads   Prefixes on their way here from lower tiers and other nodes: which requests load one
    priority       Who goes first where the event loop and the model want the same core: the loop
    seats          Who waits and who runs on a node, and what running takes
    step_recorder  What every step computed and how long it took, as lines of a file (--record-steps)
    worker         The engine loop of a prefill, decode or mixed node: schedule, compute in one thread, commit
"""
