"""KV with one byte per element: conversion between values and codes, and the layout of codes and scales in the arena.

A *row* is the key or the value of one token and head. Each row has its own scale, because blocks fill token by token
and a later token must not change the codes of earlier tokens:

    scale = max(max |x| / LARGEST, TINY)      code = round_to_nearest_even(x / scale)      x' = scale code

so |x - x'| <= scale / 2 for int8, and <= max(|x| / 16, scale / 1024) for fp8 (e4m3: 3 bits of mantissa, subnormals in
steps of 1 / 512). TINY keeps 1 / scale finite; a row of zeros stays zeros. A row with a NaN is read as NaN.

In a block the scales of a head directly follow its codes:

    [num_layers, 2, num_kv_heads, (codes [block_size, head_size] one byte each | scales [block_size] float32)]

The part of a layer is one span, and so is the part of a head. So the bytes that a transfer moves, a store keeps or a
rank owns always include their scales. All other code sees a quantized pool as a tensor of codes with the usual shape,
int8 or float8_e4m3fn. Its strides leave room for the scales, and `scales_of` finds them from any view of layers, heads
or blocks.

Backends read and write through `rows_of` and `planes`; for these functions, floats are the case without scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Names (of --kv-cache-dtype, --wire-dtype and --pool-dtype) -> element types of codes."""

POOL_DTYPES = DTYPES | {"int4": torch.quint4x2}
"""The same for blocks in the pool alone; torch.quint4x2 only names the format of attention/nibbles_torch.py."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest code of each."""

TINY = torch.finfo(torch.float32).tiny

SCALE_BYTES = 4

ROUNDING = 12582912.0
"""1.5 * 2^23: the float32 whose unit is 1, so adding it rounds to nearest even; 50 times as fast as torch.round."""


# --- numbers


def to_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x float32, divided by its scale, overwritten -> its codes as int8. `dtype` is a key of LARGEST."""
    x.clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        x.add_(ROUNDING).sub_(ROUNDING)
    return x.to(dtype).view(torch.int8)


def from_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse without the scale: int8 -> new float32."""
    return codes.float() if dtype == torch.int8 else e4m3_to_float(codes)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """codes int8 -> float32. With its bits moved to those of a float16, a code is 2^-8 of its value, also if it is
    subnormal: the exponents' biases are 7 and 15. Three times as fast as torch's conversion."""
    bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)  # sign and the other seven bits
    return bits.view(torch.float16).float().mul_(256.0)


def encode_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_size], any float type -> codes int8 of its shape, scales [..., 1] float32."""
    x = x.to(torch.float32, copy=True)
    scales = x.abs().amax(-1, keepdim=True).div_(LARGEST[dtype]).clamp_(min=TINY)
    return to_codes(x.mul_(scales.reciprocal()), dtype), scales


# --- the arena


def pool_in(memory: Tensor, shape: Sequence[int], dtype: str) -> Tensor:
    """memory [bytes] uint8 as a pool [num_blocks, *shape]; shape and dtype: of a BlockGeometry (cache/block.py)."""
    if dtype not in DTYPES:
        return memory.view(getattr(torch, dtype)).view(-1, *shape)
    *outer, block_size, head_size = shape
    codes = block_size * head_size
    heads = memory.view(-1, *outer, codes + block_size * SCALE_BYTES)
    return heads[..., :codes].view(*heads.shape[:-1], block_size, head_size).view(DTYPES[dtype])


def is_quantized(kv: Tensor) -> bool:
    return kv.dtype in LARGEST


def codes_of(kv: Tensor) -> Tensor:
    """Any quantized pool as int8, because torch indexes few types of one byte."""
    return kv.view(torch.int8)


def scales_of(kv: Tensor) -> Tensor:
    """[..., block_size, 1] float32 of a quantized kv [..., block_size, head_size]: a view of the same memory.
    Raises ValueError on a tensor that leaves no room for scales."""
    block_size, head_size = kv.shape[-2:]
    codes, room = block_size * head_size, block_size * SCALE_BYTES
    if kv.stride()[-2:] != (head_size, 1) or kv.dim() < 3 or (kv.shape[-3] > 1 and kv.stride(-3) < codes + room):
        raise ValueError(f"the strides {kv.stride()} are not those of a quantized pool (attention.codes.pool_in)")
    behind = codes_of(kv).as_strided((*kv.shape[:-2], room), (*kv.stride()[:-2], 1), kv.storage_offset() + codes)
    return behind.view(torch.float32)[..., None]


# --- what backends use


def rows_of(kv: Tensor, pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Values of the rows that `pick` takes from a pool [..., block_size, head_size], in `dtype`. `pick` is called for
    codes and for scales, which differ only in the size of the last axis."""
    if not is_quantized(kv):
        return pick(kv).to(dtype)
    values = from_codes(pick(codes_of(kv)), kv.dtype)
    return values.mul_(pick(scales_of(kv))).to(dtype)


def planes(kv: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The writes that store rows [..., head_size] in `kv`: pairs of (a plane [..., block_size, n], rows [..., n] of its
    type), one pair for floats, two (codes and scales) for a quantized pool."""
    if not is_quantized(kv):
        return [(kv, rows.to(kv.dtype))]
    codes, scales = encode_rows(rows, kv.dtype)
    return [(codes_of(kv), codes), (scales_of(kv), scales)]
