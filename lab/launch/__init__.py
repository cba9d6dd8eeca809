"""A local cluster of node processes.

Files:
    cluster  A cluster of node processes on this machine, for scripts/up
    nodes    One node process on this machine: its command
    report   The launcher's output: the table of nodes and the timeline of a request
    rest     JSON over HTTP to a node by URL, for the launcher and the tests
    up       A local cluster in one command: start the nodes, show where they are
"""
