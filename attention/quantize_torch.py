"""KV blocks in one byte per element on a CPU, or in four bits (attention/nibbles_torch.py). It encodes the blocks that
leave the arena for the pool or another node, and decodes them.

The formats of a byte are fp8 (e4m3) and int8, with one scale per head and layer of K and of V: scale = max |x| /
LARGEST, so that |x - x'| <= scale / 2 for int8 and <= max(|x| / 16, scale / 1024) for fp8. An encoded block is one span
of bytes, layer after layer, so a layer can be moved and decoded by itself:

    codes [2, num_kv_heads, block_size, head_size] one byte each | scales [2, num_kv_heads] float32

It converts a few layers at a time, so that they stay in the cache, and below the size from which torch uses the model's
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from attention import nibbles_torch
from attention.codes import LARGEST, from_codes, to_codes

CHUNK_ELEMENTS = 32_000  # ATen's grain is 32,768


def encode_block(block: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """block [num_layers, 2, num_kv_heads, block_size, head_size], finite, any float type; writes all of out [encoded
    bytes] uint8. `dtype` is a value of attention.codes.POOL_DTYPES."""
    rows = out.view(len(block), -1)
    for part in chunks(len(block), block.shape[1:]):
        rows[part] = encode_layers(block[part].to(torch.float32, copy=True), dtype)  # never the arena itself


def decode_block(encoded: Tensor, dtype: torch.dtype, block: Tensor) -> None:
    """The reverse: encoded [encoded bytes] uint8; writes the whole block, in its own type."""
    rows = encoded.view(len(block), -1)
    for part in chunks(len(block), block.shape[1:]):
        block[part] = decode_layers(rows[part], dtype, block.shape[1:])


def encode_layers(layers: Tensor, dtype: torch.dtype) -> Tensor:
    """layers [n, 2, num_kv_heads, block_size, head_size] float32, finite, overwritten; from any blocks. Returns [n,
    encoded bytes of a layer] uint8."""
    if dtype == torch.quint4x2:
        return nibbles_torch.encode_layers(layers)
    scales = layers.abs().amax((-1, -2)).div_(LARGEST[dtype])
    inverse = torch.where(scales == 0, 1.0, scales).reciprocal_()
    codes = to_codes(layers.mul_(inverse[..., None, None]), dtype)
    return torch.cat((codes.view(torch.uint8).flatten(1), scales.flatten(1).view(torch.uint8)), 1)


def decode_layers(encoded: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The reverse: encoded [n, encoded bytes of a layer] uint8, shape (2, num_kv_heads, block_size, head_size). Returns
    [n, *shape] float32."""
    if dtype == torch.quint4x2:
        return nibbles_torch.decode_layers(encoded, shape)
    codes_bytes = prod(shape)
    codes = encoded[:, :codes_bytes].view(torch.int8).view(-1, *shape)
    scales = encoded[:, codes_bytes:].contiguous().view(torch.float32).view(-1, *shape[:2])
    return from_codes(codes, dtype).mul_(scales[..., None, None])


def chunks(count: int, shape: Sequence[int]) -> list[slice]:
    """Slices of `count` layers of `shape`, each with as many layers as should be converted together."""
    step = max(1, CHUNK_ELEMENTS // prod(shape))
    return [slice(first, min(count, first + step)) for first in range(0, count, step)]
