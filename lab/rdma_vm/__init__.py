"""Real RDMA verbs without RDMA hardware: an emulated Debian kernel with Soft-RoCE, on this machine's own files.

Files:
    command   Runs tests/rdma with real RDMA verbs on any x86-64 Debian machine, in an emulated machine with Soft-RoCE
    errors    The reasons why the lab cannot run or has failed
    image     The two files QEMU boots, made from the unpacked kernel package and kept in a cache directory
    packages  The lab's Debian packages: installed tools, and a kernel that is only unpacked
    vm        One boot of the lab: QEMU's command line, the guest's exit code, its files
"""
