"""A cluster of node processes, on this machine or on others.

Files:
    cluster       A cluster of node processes on this machine, for scripts/up, the end-to-end tests and the benchmarks
    duty          Slows processes down by a duty cycle: SIGSTOP and SIGCONT in turn, in periods of some milliseconds
    expert_ranks  Processes of `mooncake.py expert-rank` on this machine, for nodes of a LocalCluster; all end with
                  the launcher
    hosts         The hosts file of scripts/up: which host runs a node of which role, and with which flags of its own
    nodes         One node process on this machine: its command, a start that lets no process outlive the launcher,
                  its end
    remote        A cluster of node processes on other hosts, started and stopped over ssh, for scripts/up --hosts
    report        The launcher's output: the table of nodes and the timeline of a request
    rest          JSON over HTTP to a node by URL, for the launcher and the tests
    up            A cluster in one command: start the nodes here or over ssh, show where they are, stop them all at
                  Ctrl-C
"""
