"""Questions about the system, answered by the simulator or by real nodes.

Files:
    command     One ablation, simulated or live: a table with 95 % intervals over seeds
    curve       FAST'25 Fig
    reproduce   Every table of the Mooncake papers that public data allows, ours beside theirs
    common/     What every ablation has: cases, looks, tables, plots
    live/       Questions put to real nodes on this machine, or to a cluster that runs
    simulated/  Ablations by name; each file is one figure of a paper or one question of its critics
"""
