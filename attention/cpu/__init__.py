"""Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context.

Files:
    backend         The `cpu` backend: C++ kernels that read K and V directly in the pool
    build           C++ for the CPU, compiled at first use: no torch headers
    codes.h         Rows of a quantized pool (attention/codes.py): codes of one byte
    decode.cpp      Paged decode attention: rows of one token each, split over
    decode.h        One token's row against its cached keys, flash-decoding style
    decode_amx.h    One token's row against its cached keys on AMX tiles, K and V straight from the pool
    decode_bf16.h   Decode.h with products of bfloat16 pairs, summed in float32, 32 elements at a time
    decode_codes.h  Products of codes for span.h: in float32 for both kinds of codes
    decode_float.h  Decode.h with float32 products, over a pool of any type; q is float32
    flash.h         Attention of many rows over the paged pool
    flash_bf16.h    Flash.h with bfloat16 products summed in float32: AMX tiles
    flash_float.h   Flash.h with float32 products by broadcast and multiply-add, over a pool of any type
    layers          The attention of all layers of a step as a list of C calls
    level           The instruction sets that kernels of the CPU are compiled for, best first
    library         The compiled kernels and their arguments, mirroring paged.h field by field
    paged.h         What every kernel is told: strided views of q and of one layer's paged pool
    prefill.cpp     Paged attention of many rows per request: which path computes it
    rotary.cpp      Rotary position embedding of q and k, half-split
    span.h          Decode over a quantized pool, read in place: decode.h, with the scales of K in the scores
    vec.h           Vectors of WIDTH floats, one register of the CPU's widest kind
    vec_avx2.h      What vec.h asks of an instruction set, in AVX2 with FMA and F16C
    vec_avx512.h    What vec.h asks of an instruction set, in AVX-512
    vec_neon.h      What vec.h asks of an instruction set, in NEON of ARMv8
"""
