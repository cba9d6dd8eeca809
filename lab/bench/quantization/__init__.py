"""The model behind prefixes that went through the pool or to another node in another type.

Files:
    command   What quantized KV costs in quality and saves in bytes, on the real model
    decodes   How long a decode step takes over an arena of 16 bit or quantized
    prefixes  A model in bfloat16, one prefix of it, and what it says behind that prefix
    quality   Answers behind a quantized prefix, judged against those behind the exact one
"""
