"""KV blocks in one byte per element on a CPU: what a block becomes when it leaves the arena for the pool, and back.

The formats are fp8 (e4m3) and int8, with one scale per head and layer of K and of V: scale = max |x| / LARGEST, so that
|x - x'| <= scale / 2 for int8 and <= max(|x| / 16, scale / 1024) for fp8. An encoded block is one span of bytes, layer
after layer:

    codes [2, num_kv_heads, block_size, head_size] one byte each | scales [2, num_kv_heads] float32

A few layers at a time: they stay in the cache, and below the size from which torch takes the threads of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.codes import LARGEST, from_codes, to_codes

CHUNK_ELEMENTS = 32_000  # ATen's grain is 32,768


def encode_block(block: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """block [num_layers, 2, num_kv_heads, block_size, head_size], finite, any float type; out [encoded bytes] uint8,
    written whole. `dtype` is a key of attention.codes.LARGEST."""
    rows = out.view(len(block), -1)
    codes_bytes = block[0].numel()
    for part in chunks(block):
        x = block[part].to(torch.float32, copy=True)  # never the arena itself
        scales = x.abs().amax((-1, -2)).div_(LARGEST[dtype])
        inverse = torch.where(scales == 0, 1.0, scales).reciprocal_()
        codes = to_codes(x.mul_(inverse[..., None, None]), dtype)
        rows[part, :codes_bytes] = codes.view(torch.uint8).flatten(1)
        rows[part, codes_bytes:] = scales.flatten(1).view(torch.uint8)


def decode_block(encoded: Tensor, dtype: torch.dtype, block: Tensor) -> None:
    """The reverse: encoded [encoded bytes] uint8; block is written whole, in its own type."""
    rows = encoded.view(len(block), -1)
    codes_bytes = block[0].numel()
    for part in chunks(block):
        codes = rows[part, :codes_bytes].view(torch.int8).view(block[part].shape)
        scales = rows[part, codes_bytes:].contiguous().view(torch.float32).view(block[part].shape[:3])
        block[part] = from_codes(codes, dtype).mul_(scales[..., None, None])


def chunks(block: Tensor) -> list[slice]:
    """Of its layers."""
    step = max(1, CHUNK_ELEMENTS // block[0].numel())
    return [slice(first, first + step) for first in range(0, len(block), step)]
