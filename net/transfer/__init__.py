"""The transfer engine: spans of bytes between registered regions of two nodes.

Files:
    engine       The transfer engine: moves spans of bytes between registered regions of two nodes
    path_finder  Which transport reaches a peer: asks what it offers, and answers peers that ask here
    report       What a transfer engine tells of its peers: rows for metrics and /debug/state
    common/      What every transport of the transfer engine shares
    device/      Transfers from and to memory of a GPU
    rdma/        RDMA: one-sided reads and writes by the network card, over libibverbs
    shm/         Transfers inside one host: shared memory
    tcp/         Transfers over TCP
"""
