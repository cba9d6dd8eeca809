"""The rivals of 2025-26 in one table: the same nodes, loads and objectives, the published figures next to ours.

Files:
    compare    Sentences and a table about the rivals, from the values and their intervals
    published  The rivals: their configuration, their source, and the figures that their papers print
    table      The ablation `rivals`: each rival on each load, and where one of them beats the default
"""
