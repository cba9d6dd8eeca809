"""Models of steps, networks, disks and caches in virtual time.

Files:
    beyond         Decode beyond memory: what does not fit is read again in every step, ahead of the layers that need
                   it
    by_formula     The step model of a published model on given hardware, by formula: the groups of its KV, and its
                   weights
    caches         The locations of blocks: on one node, in the pool, and on all nodes as digests report them
    contention     Nodes that share a machine: a step takes longer while another node computes
    costs          A node's knowledge of the time of its own steps: fitted to noisy steps, as real nodes do, or exact
    disk           An SSD: reads and writes share its bandwidth evenly, and each block also takes 1 / IOPS of its time
    expert_ranks   A step model whose experts are spread over ranks: copies, imbalance, bytes between ranks, masked
                   ranks
    fit            Step models from recorded steps: the regressions of sched.cost over a whole recording
    gossip         The nodes' knowledge of each other by the gossip of production: SWIM membership and cache digests,
                   in virtual time
    loop           The virtual clock: events in order of time; equal times in the order in which they were set
    network        NICs shared by flows: each flow runs at the smaller of its fair shares at both ends
    noise          Steps take longer or shorter by chance: a factor with mean 1, drawn by the seed
    pool           The fast stand-in for the pooled store (shares.py): the nodes' DRAM as one cache, their SSDs behind
                   it, inclusive
    prefill_group  Long prompts on a group of prefill nodes, and short prompts: as a pipeline, with divided tokens, or
                   on one
    presets        Step models by name, from a file, or by formula: the values of --model and --model-geometry
    segment        Decode steps that are not simulated one by one
    shares         The pooled store by the classes of production, in virtual time
    speculation    A step model whose decode steps verify drafts
    step_models    Step times and KV sizes: presets by formula, or coefficients fitted to a recorded run
    steps          Steps of a real engine, written by a node with --record-steps
"""
