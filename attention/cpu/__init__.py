"""Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context.

Files:
    backend     The `cpu` backend: C++ kernels that read K and V directly in the pool
    build       C++ for the CPU, compiled at first use: no torch headers, called through ctypes with data_ptr()
    codes.h     Rows of a quantized pool: codes of one byte, and behind the codes of a head the scales of its tokens
    delta_rule  The gated delta rule in C++ on states in the pool (attention/delta_states.py): delta/step.cpp and
                delta/chunk.cpp
    layers      The attention of all layers of a step as a list of C calls, for a caller that runs them without the
                interpreter
    level       The instruction sets that kernels of the CPU are compiled for, best first
    library     The compiled kernels and their arguments, mirroring paged.h field by field
    paged.h     The arguments of every kernel: strided views of q and of one layer's paged pool, and the ragged batch
    rotary.cpp  Rotary position embedding of q and k, half-split, and the write of k and v into the paged pool
    decode/     Decode attention: rows of one token each, by products in float32, bfloat16, tiles or codes
    delta/      The gated delta rule over states in the pool: one token of each request, or many tokens of one
    prefill/    Prefill attention: many rows per request, by products in float32 or bfloat16
    vectors/    Vectors of floats in one register of the CPU, in the compiler's own vector types
"""
