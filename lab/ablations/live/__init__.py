"""Questions answered by real nodes on this machine, or by a running cluster.

Files:
    batching   Two cores as one prefill and one decode node
    calibrate  The data to which a step model of running nodes is fitted
    case       A case of a live ablation: a cluster that differs from others in its flags
    kv         KV between real nodes: overlapped with computation or not, in 16 or in 8 bits
    loads      Requests for nodes of this machine, as rows of a trace: the simulator takes the same rows
    overload   Overload of real nodes: twice the load that a prefill and a decode node can serve
    placement  The benefit of choosing the node, on two nodes that prefill and decode
    play       Starts nodes on this machine, each on separate cores, and sends requests to them
    pool       Hit rates of real nodes: with local caches or a pool, over networks of several speeds
    run        Runs a live ablation seed by seed with rotating case order
    search     One try of a capacity search on real nodes: requests at a rate, judged by objectives
    shares     CPU time of nodes by thread, and of the client, during a measurement
    table      Live ablations by name, and the reason why the others are only simulated
    twin       The simulated counterpart of nodes on this machine: the same configuration
"""

from __future__ import annotations
