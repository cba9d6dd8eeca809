"""Attention kernels in Triton for NVIDIA GPUs.

Files:
    aot             Compiles kernels ahead of time, without the GPU
    backend         The Triton backend: split-KV decode for the rows [0, num_decodes); short queries or chunked
                    prefill for the rest
    codes           Rows of a quantized pool for the Triton kernels: the numbers and the layout of attention/codes.py
    decode          Paged decode: one query row per request against its whole context, the context split over many
                    programs
    geometry        The constants that a kernel is compiled for, and the layout of heads in a layer's part of a block
    hopper          Long chunks on Hopper: one warp group copies, two compute, and each computes its softmax while the
                    other multiplies
    latent_decode   Paged decode over latent rows: one query row per request and head, the context split over many
                    programs
    latent_prefill  Chunked prefill over latent rows in a paged pool
    latent_rows     The part common to decode and prefill: one step of the online softmax over a tile of latent rows
    latent_tiles    The tiles of the latent kernels, and the constants that they are compiled for
    latent_write    Writes latent rows into the paged pool: row t goes to slot_mapping[t] = block * BLOCK_SIZE +
                    offset
    merge           The splits of a context, merged into the output of a row: each part weighs 2^lse
    norm_gate       The operations of a decoder layer between its matrix products: RMS norm and the gate of the MLP
    paging          The part common to the decode and prefill kernels: one step of the online softmax over a tile of
                    paged keys
    prefill         Chunked prefill over a paged prefix: the new tokens of a request attend to all cached tokens and
                    to one another
    short           Short queries over long contexts: several query rows per request, the context split over many
                    programs
    tiles           The tile table: the tile of one program, for every head size, element type and shared-memory size
    work            Cuts a ragged batch into equal pieces of work, on the device
    write           Writes new keys and values into the paged pool, as they are or with rotary embedding
    delta/          The gated delta rule over states in the pool, in Triton
    products/       Products with quantized weights
"""
