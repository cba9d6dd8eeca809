"""The operations of a model on CPUs in C++; engine/model/ops/cpu.py compiles and calls them.

Files:
    bytes.h        y = x w^T for weights of one byte with float32 scales: in memory as a checkpoint has them, never
                   widened
    dot.h          Exact sums of products of bytes: rows of x as signed bytes c, x = e c with e = max |x| / 127;
                   weights are unsigned
    formats.h      Weights in groups of inputs that share a scale: the packed layout of each kind, and rows of x in
                   the same groups
    gemm_amx.h     y = x w^T on the AMX tiles of one thread, for a bfloat16 weight packed once in the order in which
                   it is read
    gemm_any.h     y = x w^T by vector instructions of any level, for a weight packed once in the order in which it is
                   read
    groups.h       y = x w^T for weights in groups of inputs that share a scale: in memory as a GGUF file has them,
                   never widened
    opened.h       Products of many rows by pairs of 16 bits, where the CPU does not multiply quads of bytes
    ops.h          The operations of engine/model/ops/cpu.py, over products and packed weights
    ops_amx.cpp    The operations with products of bfloat16 (-DELEMENT=Bf16) on AMX tiles
    ops_any.cpp    The operations at levels without tiles, for one type of elements, and of quantized weights at every
                   level
    ops_bytes.cpp  The operations of weights of one byte with float32 scales at every level, for one type of elements
    team.h         The threads of one operation: torch's OpenMP pool, a barrier, memory that stays with a thread
    vectors.h      Elements of the model's type in memory, float32 in registers of any level
    weight.h       A packed weight, and the epilogues of products with it: bias, activation, addition, and the only
                   rounding
"""
