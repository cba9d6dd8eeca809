"""The locations of blocks in DRAM, readable by other processes of the host.

Files:
    block_read.c  Blocks out of memory that others may change: found in a SharedIndex
    block_read    Reads many blocks through the index of another process in one C call: finds
    shared_index  The blocks in this node's DRAM and their locations
"""
