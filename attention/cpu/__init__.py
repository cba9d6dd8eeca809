"""Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context.

Files:
    backend         The `cpu` backend: C++ kernels that read K and V directly in the pool
    build           C++ for the CPU, compiled at first use: no torch headers, called through ctypes with data_ptr()
    codes.h         Rows of a quantized pool: codes of one byte, and behind the codes of a head the scales of its
                    tokens
    decode.cpp      Paged decode attention: rows of one token each, split over
    decode.h        One token's row against its cached keys, flash-decoding style
    decode_amx.h    One token's row against its cached keys on AMX tiles, K and V straight from the pool, 16 keys a
                    tile
    decode_bf16.h   decode.h with products of bfloat16 pairs, summed in float32, 32 elements at a time
    decode_codes.h  Products of codes for span.h: in float32 for both kinds of codes, in 16-bit integers for int8
    decode_float.h  decode.h with float32 products, over a pool of any type; q is float32
    flash.h         Attention of many rows over the paged pool; queries are lanes, so nothing is reduced across lanes
    flash_bf16.h    flash.h with bfloat16 products summed in float32: AMX tiles, or vdpbf16ps where there is no AMX
    flash_float.h   flash.h with float32 products by broadcast and multiply-add, over a pool of any type; T is float
                    for codes
    layers          The attention of all layers of a step as a list of C calls, for a caller that runs them without
                    the interpreter
    level           The instruction sets that kernels of the CPU are compiled for, best first
    library         The compiled kernels and their arguments, mirroring paged.h field by field
    paged.h         What every kernel is told: strided views of q and of one layer's paged pool, and the ragged batch
    prefill.cpp     Paged attention of many rows per request: which path computes it, and how the columns are split
                    over threads
    rotary.cpp      Rotary position embedding of q and k, half-split, and the write of k and v into the paged pool
    span.h          Decode over a quantized pool, read in place: decode.h, with the scales of K in the scores, those
                    of V in the weights
    vec.h           Vectors of WIDTH floats, one register of the CPU's widest kind, in the compiler's own vector types
    vec_avx2.h      What vec.h asks of an instruction set, in AVX2 with FMA and F16C
    vec_avx512.h    What vec.h asks of an instruction set, in AVX-512
    vec_neon.h      What vec.h asks of an instruction set, in NEON of ARMv8
"""
