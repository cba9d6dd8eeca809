"""Vectors of floats in one register of the CPU, in the compiler's own vector types.

Files:
    vec.h         Vectors of WIDTH floats, one register of the CPU's widest kind, in the compiler's own vector types
    vec_avx2.h    The operations that vec.h needs of an instruction set, in AVX2 with FMA and F16C
    vec_avx512.h  The operations that vec.h needs of an instruction set, in AVX-512
    vec_neon.h    The operations that vec.h needs of an instruction set, in NEON of ARMv8
"""
