"""Questions put to real nodes on this machine, or to a cluster that runs.

loads.py      requests, seeded: for the nodes and, the same ones, for the simulator
play.py       a cluster of pinned nodes, requests through it, figures as lab.simulator.result has them
shares.py     who had the cores
calibrate.py  what a step model is fitted to: recorded steps, the way in, the hand-over
case.py       what a live ablation is; run.py runs one
placement.py pool.py batching.py kv.py speculation.py      the ablations

Files:
    batching     Two cores as one prefill and one decode node
    calibrate    What a step model of running nodes is fitted to
    case         What a live ablation is: a question, clusters that differ in flags, requests, metrics
    kv           How KV moves between real nodes: overlapped with its computation or not, in 16 or in 8 bits
    loads        Requests for nodes of this machine, as rows of a trace: the simulator takes the same rows
    placement    What the choice of the node brings, on two nodes that prefill and decode
    play         Nodes of this machine, each on cores of its own, and requests through them
    pool         What real nodes find: in caches of their own or in a pool, over networks of several speeds
    run          Runs a live ablation: seed by seed, so that a slow moment of the machine meets every case
    search       One try of a capacity search on real nodes: requests at a rate, judged by objectives
    shares       Who had the cores: CPU time of nodes by thread, and of the client
    speculation  Guessed tokens with KV that is found and KV that is computed
    table        Live ablations by name, and why the others are simulated only
    twin         The simulated counterpart of nodes on this machine: the same configuration
"""

from __future__ import annotations
