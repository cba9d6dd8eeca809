"""Codes floats without loss for slow links.

    definition   The bytes of a coded frame, as numpy computes them: the C code is tested against this
    exponents    Codes the exponents of floats, and leaves signs and mantissas as they are: a third of bfloat16 KV less
    exponents.c  Codes and decodes the exponents of floats without loss
    paying       When coding makes a transfer faster: a rule of four rates
"""
