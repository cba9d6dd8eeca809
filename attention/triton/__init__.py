"""Attention kernels in Triton for NVIDIA GPUs.

Files:
    aot        Compiles kernels ahead of time, without the GPU
    backend    The Triton backend: split-KV decode for the rows [0, num_decodes)
    codes      Rows of a quantized pool for the Triton kernels
    decode     Paged decode: one query row per request against its whole context
    norm_gate  The operations of a decoder layer between its matrix products: RMS norm
    paging     The part common to the decode and prefill kernels
    prefill    Chunked prefill over a paged prefix
    tiles      The tile table: the tile of one program, for every head size
    work       Cuts a ragged batch into equal pieces of work, on the device
    write      Writes new keys and values into the paged pool, as they are or with rotary embedding
"""
