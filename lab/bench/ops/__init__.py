"""The parts of scripts/bench.py ops.

Files:
    blocks.cpp  Reads blocks of memory that are scattered, and does nothing else: what attention over paged KV can
                read at most
    blocks      Calls that only read scattered blocks of a paged pool: the limit of attention that reads each block
                once
    command     The products of a step at each level of this CPU, against F.linear, oneDNN's packed weights and the
                machine's limits
    limits.cpp  The limits of this machine: bytes read per second, and products of AMX tiles held in registers
    limits      The limits of this machine that no kernel can exceed: bytes read per second, and torch's best matrix
                product
    one_level   Rows of one level, in a process whose torch has the instructions of that level
    products    Each product of the embedded model's layer: ours, F.linear, oneDNN with packed weights, and the
                machine's limits
    quantized   Products of quantized weights: those of one layer of the embedded model, and the same products of
                widened weights
    steps       Whole steps of the embedded model, with TorchOps and with CpuOps
"""
