"""A local cluster of node processes.

Files:
    cluster  A cluster of node processes on this machine, for scripts/up, the end-to-end tests and the benchmarks
    nodes    One node process on this machine: its command, a start that lets no process outlive the launcher, its end
    report   The launcher's output: the table of nodes and the timeline of a request
    rest     JSON over HTTP to a node by URL, for the launcher and the tests
    up       A local cluster in one command: start the nodes, show where they are, stop them all at Ctrl-C
"""
