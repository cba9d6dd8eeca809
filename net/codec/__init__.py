"""Codes floats without loss for slow links.

Files:
    definition   The bytes of a coded frame, as numpy computes them: the C code is tested against this
    exponents.c  Codes and decodes the exponents of floats without loss; net/codec/definition.py defines the bytes
    exponents    Codes the exponents of floats, and leaves signs and mantissas as they are
    paying       When coding makes a transfer faster: a rule of four rates; and when rounding does
"""
