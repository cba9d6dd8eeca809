"""The locations of blocks in DRAM, readable by other processes of the host.

Files:
    block_read.c  Copies blocks out of memory that others may change, and compares them with their checksum in the
                  same pass
    block_read    Reads many blocks through the index of another process in one C call: finds, copies and compares
                  them
    loans         Slots that a home lends to processes of its host, which write blocks into them without asking
    shared_index  The blocks in this node's DRAM and their locations, in memory that processes of the host read
                  directly
"""
