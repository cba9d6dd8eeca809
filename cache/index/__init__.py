"""Where blocks lie in DRAM, readable by the other processes of the host.

Files:
    block_read.c  Blocks out of memory that others may change: found in a SharedIndex
    block_read    Blocks read through the index of another process in one C call for many: found, copied
    shared_index  Which blocks lie in this node's DRAM and where
"""
