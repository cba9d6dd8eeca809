"""The number of nodes for a load, and whether simulator and nodes agree.

Files:
    capacity  The highest load at which a cluster, simulated or live, keeps its objectives, by bisection
    check     Checks plans against the simulator, with random loads and objectives
    command   The smallest cluster for a load and its objectives, by formula: the number of prefill and decode nodes,
              and its cost
    roofline  When reuse and disaggregation pay, for a model on given hardware; and what this machine reaches
    validate  The simulator against real nodes: a step model is fitted to recorded steps, then both get the same
              requests
"""
