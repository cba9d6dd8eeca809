"""How many nodes a load needs, and whether simulator and nodes agree.

Files:
    capacity  The highest load at which a cluster, simulated or live, keeps its objectives, by bisection
    check     Holds plans against the simulator: random loads and objectives
    command   The smallest cluster for a load and its objectives, by formula
    roofline  When reuse pays and when disaggregation does, for a model on some hardware
    validate  The simulator against real nodes: a step model is fitted to recorded steps
"""
