"""Questions about the system, answered by the simulator or by real nodes.

Files:
    command     One ablation, simulated or live
    curve       FAST'25 Fig
    reproduce   Every table of the Mooncake papers that public data allows, with our values and theirs
    common/     Shared by all ablations: cases, looks, tables, plots
    live/       Questions answered by real nodes on this machine, or by a running cluster
    simulated/  Simulated ablations by name; each file is one figure of a paper or one question of its critics
"""
