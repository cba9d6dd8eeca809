"""Nodes for the load: roles that change, nodes that start and leave.

Files:
    command       Calls --scale-command: starts a node, or frees what it ran on
    role_changes  The shell of sched/role_change.py: reads the gossiped records every few seconds and sets the
                  engine's role
    scaler        The shell of sched/scaling/: reads the gossiped records, starts nodes by --scale-command, and lets
                  nodes leave
"""
