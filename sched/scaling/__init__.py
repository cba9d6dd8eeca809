"""How many nodes of each role the load needs, how many ranks a node, and which of them start or leave. Pure.

Files:
    autoscaler  Decides which nodes start and which leave, so that each role has as many as its load needs
    bounds      The roles whose nodes start and leave with the load, and how many of each there may be
    crew        Members of one kind, nodes of a role or ranks of a node, that start and leave with the need for them
    need        Estimates from gossiped load how many nodes of one role meet the objectives
    width       Decides how many ranks share the experts of a node, and which of them start and leave
"""
