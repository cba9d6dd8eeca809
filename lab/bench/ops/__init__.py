"""The parts of scripts/bench.py ops.

Files:
    command     The products of a step at each level of this CPU, against F.linear
    limits.cpp  The limits of this machine: bytes read per second
    products    Each product of the embedded model's layer: ours, F.linear
    quantized   Products of quantized weights: those of one layer of the embedded model
    steps       Whole steps of the embedded model: Runner, sampler and the cpu attention backend
"""
