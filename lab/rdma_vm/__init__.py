"""Real RDMA verbs without RDMA hardware: a Debian kernel with Soft-RoCE, emulated, on this machine's own files.

Files:
    command   Real RDMA verbs on any x86-64 Debian machine: boots a stock kernel with Soft-RoCE
    errors    Why the lab cannot run, or did not
    image     The two files QEMU boots, made from the unpacked kernel package and kept in a cache directory
    packages  What the lab takes from Debian: tools that are installed, and a kernel that is only unpacked
    vm        One boot of the lab: QEMU's command line, the guest's exit code, its files
"""
