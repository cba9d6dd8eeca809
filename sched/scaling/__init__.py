"""How many nodes of each role the load needs, and which of them start or leave. Pure.

Files:
    autoscaler  Decides which nodes start and which leave, so that each role has as many as its load needs
    bounds      The roles whose nodes start and leave with the load, and how many of each there may be
    need        Estimates from gossiped load how many nodes of one role meet the objectives
"""
