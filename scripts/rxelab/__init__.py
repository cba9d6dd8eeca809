"""Real RDMA verbs without RDMA hardware: a Debian kernel with Soft-RoCE, emulated, on this machine's own files."""
