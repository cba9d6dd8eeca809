"""Measures the model after prefixes that went through the pool, or to another node, in another type.

Files:
    command   The quality loss and the saved bytes of quantized KV and weights, on the real model
    decodes   The time of a decode step over a 16-bit and over a quantized arena
    prefixes  A model in bfloat16, one prefix of it, and what it says behind that prefix
    quality   Answers after a quantized prefix, compared with those after the exact one
"""
