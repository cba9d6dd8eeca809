"""Real RDMA verbs without RDMA hardware: a Debian kernel with Soft-RoCE in an emulated machine whose disk is this one's."""
