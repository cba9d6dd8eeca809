"""`python mooncake.py doctor`: what this machine offers to a node, and what would improve it.

Files:
    compute  CPU features, compiler, OpenMP, GPU
    finding  The result of a check, and the machine that it examines
    memory   Memory shared by processes of one host, and its page sizes
    paths    The path that KV would take to a peer: derived from this machine, or tested with a running peer
    rails    Which RDMA devices form rails, which CPUs and GPUs they are close to, and whether they reach GPU memory
             directly
    rdma     Library, devices, ports, addresses, and the memory that they may pin
    run      Reports what this machine offers to a node, what is missing, and which path KV would take to a peer
    storage  The folders of the SSD tier and of layers that are read
    tcp      The limits of a connection between two hosts
"""
