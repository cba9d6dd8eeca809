"""Questions answered by real nodes on this machine, or by a running cluster.

Files:
    batching     Two cores as one prefill and one decode node, or as two mixed nodes under each batching policy
    calibrate    The data to which a step model of running nodes is fitted: their recorded steps, and the latencies a
                 client sees
    case         A case of a live ablation: a cluster that differs from others in its flags, and the requests that it
                 gets
    fetches      The fetches of real nodes from the pool, by the timelines of requests: tokens by tier, and how fast
    kv           KV between real nodes: overlapped with computation or not, in 16 or in 8 bits
    loads        Requests for nodes of this machine, as rows of a trace: the simulator takes the same rows
    overload     Overload of real nodes: twice the load that a prefill and a decode node can serve, by rejection
                 variant
    placement    The benefit of choosing the node, on two nodes that prefill and decode
    play         Starts nodes on this machine, each on separate cores, and sends requests to them
    pool         Hit rates of real nodes: with local caches or a pool, over networks of several speeds
    run          Runs a live ablation seed by seed with rotating case order, so that a slow period of the machine
                 affects every case
    search       One try of a capacity search on real nodes: requests at a rate, judged by objectives
    shares       CPU time of nodes by thread, and of the client, during a measurement
    shifts       Loads that are hard for caches on real nodes: lengths without a mean, a viral prefix, prefixes that
                 flip
    speculative  Speculation between real nodes: a draft model whose KV of the prompt is never there, and n-grams
    table        Live ablations by name, and the reason why the others are only simulated
    throttle     Nodes of this machine that differ: a duty cycle makes some of them slow, and they are cheap
    twin         The simulated counterpart of nodes on this machine: the same configuration, the same requests
    unlike       Slow and cheap nodes next to fast and dear ones on this machine: placement by cost, by time alone,
                 and by chance
"""

from __future__ import annotations
