"""Measures the model after prefixes that went through the pool, or to another node, in another type.

Files:
    command   The quality loss and the saved bytes of quantized KV and weights, on the real model
    decodes   The time of a decode step over a 16-bit and over a quantized arena, if reading KV is a large part of it
    prefixes  Predictions of a bfloat16 model behind a prefix: in an arena of 16 bit or quantized, and behind
              quantized copies
    quality   Answers after a quantized prefix, compared with those after the exact one
"""
