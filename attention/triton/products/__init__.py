"""Products with quantized weights.

Files:
    byte_product   y = x w^T for weights of one byte, int8 or fp8 (e4m3), with float32 scales
    group_planes   The memory layout of weights in groups of inputs for products/group_product.py: the bits of a GGUF
                   file
    group_product  y = x w^T for weights in groups of inputs, which become floats only in registers
    group_weights  Weights in groups of inputs as floats in registers (products/group_planes.py); rows of an embedding
"""
