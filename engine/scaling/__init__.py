"""Nodes for the load: roles that change, nodes and ranks with experts that start and leave.

Files:
    command       Calls --scale-command or --expert-scale-command: starts a node or a rank, or frees what it ran on
    orders        Carries out the decisions of a rule of sched/scaling/, each in a task of its own; logs and counts
                  them
    rank_scaler   The shell of sched/scaling/width.py: starts and ends ranks for this node's own load, by --expert-
                  scale-command
    role_changes  The shell of sched/role_change.py: reads the gossiped records every few seconds and sets the
                  engine's role
    scaler        The shell of sched/scaling/: reads the gossiped records, starts nodes by --scale-command, and lets
                  nodes leave
"""
