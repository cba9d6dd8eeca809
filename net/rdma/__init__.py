"""RDMA: one-sided reads and writes by the network card, over libibverbs."""
