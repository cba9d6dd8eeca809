"""KV blocks in one byte per element, for the pool and the wire: fp8 (e4m3) and int8 with a scale per head.

A block is [num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_SIZE]; the last two axes are one *span*: the keys, or the
values, of one head of one layer, dense in memory. Every span has its own scale:

    scale = max |x| / LARGEST        code = round_to_nearest_even(x / scale)        x' = scale code

LARGEST is 448 for e4m3 and 127 for int8, so |x - x'| <= scale / 2 for int8 and <= max(|x| / 16, scale / 1024) for
e4m3 (3 bits of mantissa, subnormals in steps of 1 / 512). Only the first `tokens` of a block are looked at: what lies
behind is written as zeros, so an unfilled slot cannot spoil the scale. A span of zeros has scale 0. Inputs must be
finite.

The e4m3 conversion is spelt in integer operations: sm_80 has no instruction for it, the interpreter none either, and
both kernels wait for memory anyway. Codes are those of torch.float8_e4m3fn. Blocks are picked from the pool by number:
quantizing gathers, dequantizing scatters, and neither needs a copy of the block in between.

Figures on a GPU are still to be measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.codes import LARGEST

WIDTH = 2048
"""Elements per turn of the loop."""


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """x [..] float32, |x| <= 448 -> uint8 codes, rounded to nearest even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of float32's 23 mantissa bits go; 960 = (127 - 7) << 3 moves the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the codes are multiples of 2^-9: the unit of float32 at 2^14, so one addition rounds.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 codes -> float32."""
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """x [..] float32, |x| <= 127 -> int8 codes, rounded to nearest even."""
    # 1.5 * 2^23: the float32 whose unit is 1, so that the addition rounds.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def quantize_kernel(
    pool: tl.tensor,  # [num_blocks, spans, SPAN], a block dense
    blocks: tl.tensor,  # [N] int64: which blocks
    tokens: tl.tensor,  # [N] int32: how many of a block's tokens count
    payload: tl.tensor,  # [N, spans, SPAN] uint8 codes (e4m3) or int8; written
    scales: tl.tensor,  # [N, spans] float32; written
    block_stride: tl.tensor,  # elements
    SPAN: tl.constexpr,  # BLOCK_SIZE * HEAD_SIZE
    HEAD_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest code
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid (N, spans). Reads a span twice: for its maximum, then (from the cache) for its codes."""
    n, span = tl.program_id(0), tl.program_id(1)
    filled = tl.load(tokens + n) * HEAD_SIZE
    source = pool + tl.load(blocks + n) * block_stride + span * SPAN
    row = n.to(tl.int64) * tl.num_programs(1) + span
    largest = tl.zeros([WIDTH], tl.float32)
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)
        x = tl.load(source + i, mask=(i < filled) & (i < SPAN), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.div_rn(tl.max(largest, 0), tl.full([], LIMIT, tl.float32))
    tl.store(scales + row, scale)
    # The plain division of a GPU is an ulp or two off, and codes at a midpoint would round otherwise than torch's.
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(scale == 0, 1.0, scale))
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)
        x = tl.load(source + i, mask=(i < filled) & (i < SPAN), other=0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(x * inverse, -LIMIT), LIMIT)
        code = to_e4m3(x) if FP8 else to_int8(x)
        tl.store(payload + row * SPAN + i, code, mask=i < SPAN)


@triton.jit
def dequantize_kernel(
    payload: tl.tensor,  # [N, spans, SPAN] uint8 codes (e4m3) or int8
    scales: tl.tensor,  # [N, spans] float32
    pool: tl.tensor,  # [num_blocks, spans, SPAN], a block dense; written
    blocks: tl.tensor,  # [N] int64: which blocks
    block_stride: tl.tensor,  # elements
    SPAN: tl.constexpr,
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid (N, spans)."""
    n, span = tl.program_id(0), tl.program_id(1)
    row = n.to(tl.int64) * tl.num_programs(1) + span
    scale = tl.load(scales + row)
    place = pool + tl.load(blocks + n) * block_stride + span * SPAN
    for start in range(0, SPAN, WIDTH):
        i = start + tl.arange(0, WIDTH)
        code = tl.load(payload + row * SPAN + i, mask=i < SPAN, other=0)
        value = from_e4m3(code) if FP8 else code.to(tl.float32)
        tl.store(place + i, (value * scale).to(pool.dtype.element_ty), mask=i < SPAN)


def quantize_blocks(pool: Tensor, blocks: Tensor, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks of pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size] as (payload [N, ... the same]
    of `dtype`, scales [N, num_layers, 2, num_kv_heads] float32). blocks [N] int64; tokens [N] int32 is how many of
    each block's tokens count. Raises ValueError on another dtype than float8_e4m3fn and int8."""
    check_pool(pool, dtype)
    count = blocks.shape[0]
    span, head_size = pool.shape[4] * pool.shape[5], pool.shape[5]
    payload = torch.empty((count, *pool.shape[1:]), dtype=dtype, device=pool.device)
    scales = torch.empty((count, *pool.shape[1:4]), dtype=torch.float32, device=pool.device)
    if count:
        quantize_kernel[(count, pool.shape[1:4].numel())](
            pool,
            blocks,
            tokens,
            codes_of(payload),
            scales,
            pool.stride(0),
            SPAN=span,
            HEAD_SIZE=head_size,
            LIMIT=LARGEST[dtype],
            FP8=dtype != torch.int8,
            WIDTH=min(WIDTH, triton.next_power_of_2(span)),
            num_warps=4,
        )
    return payload, scales


def dequantize_blocks(payload: Tensor, scales: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """The reverse: writes blocks [N] int64 of `pool`, in its own element type, whole."""
    check_pool(pool, payload.dtype)
    if not payload.is_contiguous() or not scales.is_contiguous() or payload.shape[1:] != pool.shape[1:]:
        raise ValueError(f"payload {tuple(payload.shape)} must be dense and match pool {tuple(pool.shape)}")
    span = pool.shape[4] * pool.shape[5]
    if blocks.shape[0]:
        dequantize_kernel[(blocks.shape[0], pool.shape[1:4].numel())](
            codes_of(payload),
            scales,
            pool,
            blocks,
            pool.stride(0),
            SPAN=span,
            FP8=payload.dtype != torch.int8,
            WIDTH=min(WIDTH, triton.next_power_of_2(span)),
            num_warps=4,
        )


def codes_of(payload: Tensor) -> Tensor:
    """The payload as the integers that the kernels compute with."""
    return payload if payload.dtype == torch.int8 else payload.view(torch.uint8)


def check_pool(pool: Tensor, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise ValueError(f"KV blocks quantize to {', '.join(str(known) for known in LARGEST)}, not to {dtype}")
    if pool.dim() != 6 or (len(pool) and not pool[0].is_contiguous()):
        raise ValueError(f"a pool [blocks, layers, 2, heads, tokens, head size] of dense blocks, not {pool.shape}")
