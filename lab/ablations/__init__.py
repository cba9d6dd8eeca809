"""Questions about the system, answered by the simulator or by real nodes.

Files:
    command     One ablation, simulated or live: a table with 95 % intervals over seeds and the paper's values, and a
                plot
    curve       FAST'25 Fig. 9: the token hit rate of one global LRU cache by its size
    reproduce   Every table of the Mooncake papers that public data allows, with our values and theirs
    by_model/   Ablations by the groups of a model's KV: several models on the same nodes, by formula
    common/     Shared by all ablations: cases, looks, tables, plots
    decoding/   Ablations of decode nodes: short and long answers, contexts and models beyond memory, and requests
                that move
    fleet/      Ablations of the nodes themselves: how many there are over time, what unlike ones cost, and where they
                are
    groups/     Ablations of long prompts on groups of prefill nodes
    live/       Questions answered by real nodes on this machine, or by a running cluster
    rivals/     The rivals of 2025-26 in one table: the same nodes, loads and objectives, the published figures next
                to ours
    simulated/  Simulated ablations by name; each file is one figure of a paper or one question of its critics
"""
