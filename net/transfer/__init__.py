"""The transfer engine: spans of bytes between registered regions of two nodes.

Files:
    engine       The transfer engine: moves spans of bytes between registered regions of two nodes
    path_finder  Finds the transport to a peer: asks which transports the peer offers, and answers the same question
                 of peers
    report       Reports of a transfer engine on its peers: rows for metrics and /debug/state, and rates for the
                 scheduler
    cma/         Copies between the memory of two processes of one host, whether it is shared or not
    common/      The common parts of all transports of the transfer engine
    device/      Transfers from and to memory of a GPU
    rdma/        RDMA: one-sided reads and writes by the network card, over libibverbs
    shm/         Transfers inside one host: shared memory
    tcp/         Transfers over TCP
"""
