"""Models of steps, networks, disks and caches in virtual time.

Files:
    caches       Which blocks are where: of one node, of the pool, and of all nodes as others were told
    contention   Nodes that share a machine: a step takes longer while another node computes
    disk         An SSD: reads and writes share its bandwidth evenly
    fit          Step models from recorded steps: the regressions of sched.cost over a whole recording
    loop         The virtual clock: events in order of time, equals in the order in which they were set
    network      NICs whose flows share them: each flow runs at the smaller of its fair shares at both ends
    pool         The pooled store: the nodes' DRAM as one cache, their SSDs behind it
    presets      Step models by name or from a file: what --model takes
    speculation  A step model whose decode steps verify drafts
    step_models  How long steps take, and what KV weighs: presets by formula
    steps        Steps of a real engine, as a node with --record-steps wrote them
"""
