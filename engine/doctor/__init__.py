"""`python mooncake.py doctor`: what this machine offers a node, and what would make it better.

Files:
    compute  What computes: CPU features, compiler, OpenMP, GPU
    finding  What a check says, and the machine it looks at
    memory   Memory that processes of one host share, and its pages
    paths    The way KV would take to a peer: from what is here, or tried with a peer that runs
    rails    Which RDMA devices are which rail and near what
    rdma     Library, devices, ports, addresses, and the memory they may pin
    run      What this machine offers a node, what is missing and how to get it
    storage  The directory of the SSD tier
    tcp      What limits a connection between two hosts
"""
