"""Weights in groups of inputs as floats in registers (products/group_planes.py); rows of an embedding."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.products.group_planes import Planes

TILE_BYTES = 64
"""Codes of an output that a program reads at once."""


@triton.jit
def powers_of_two(bits: tl.tensor) -> tl.tensor:
    """2^(bits - 127) of bytes; that of 0 has no leading one in float32."""
    e = bits.to(tl.int32)
    return tl.where(e == 0, 0x400000, e << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(codes: tl.tensor) -> tl.tensor:
    """With its bits moved to those of a float16, a code is 2^-14 of its value: the exponents' biases are 1 and 15."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def weights_of(
    stored: tl.tensor,  # [OUTPUTS, CHUNKS, HALF] bytes of codes
    high: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    factors: tl.tensor,
    moves: tl.tensor,
    n: tl.tensor,  # [OUTPUTS, 1, 1] int64
    chunk: tl.tensor,  # [1, CHUNKS, 1]
    held: tl.tensor,  # [1, CHUNKS, 1]
    K: tl.tensor,
    high_row: tl.tensor,  # bytes of an output
    PART: tl.constexpr,  # 0: the low halves of bytes, or whole bytes
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMA: tl.constexpr,
    FACTORS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SPAN: tl.constexpr,
    FLOATS: tl.constexpr,
) -> tl.tensor:
    """float32 [OUTPUTS, CHUNKS, HALF]; zeros where `held` is False."""
    first = (chunk * PARTS + PART) * HALF
    h = tl.arange(0, HALF)[None, None, :]
    k = first + h
    q = stored.to(tl.int32)
    if PARTS == 2:
        q = (q >> (4 * PART)) & 15
    if HIGH_BITS > 0:
        bits = tl.load(high + n * high_row + (first // SPAN * 32 + h % 32), mask=held, other=0).to(tl.int32)
        q |= ((bits >> (HIGH_BITS * (k % SPAN // 32))) & ((1 << HIGH_BITS) - 1)) << 4
    d = tl.load(scales + n * (K // BLOCK) + first // BLOCK, mask=held, other=0)  # one for a chunk
    group = (first if GROUP >= HALF else k) // GROUP
    if FLOATS:
        w = e2m1(q) * powers_of_two(d)
    else:
        d = d.to(tl.float32)
        if FACTORS:
            d = d * tl.load(factors + n * (K // GROUP) + group, mask=held, other=0).to(tl.float32)
        w = (q - OFFSET).to(tl.float32) * d
    if MINIMA:
        m = tl.load(minima + n * (K // BLOCK) + first // BLOCK, mask=held, other=0).to(tl.float32)
        if FACTORS:
            m = m * tl.load(moves + n * (K // GROUP) + group, mask=held, other=0).to(tl.float32)
        w += m
    return w


@triton.jit
def rows_kernel(
    ids: tl.tensor,  # [R] int64
    codes: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    factors: tl.tensor,
    moves: tl.tensor,
    y: tl.tensor,  # [R, K] dense, written
    K: tl.tensor,
    code_row: tl.tensor,  # bytes of an output
    high_row: tl.tensor,
    CHUNKS: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMA: tl.constexpr,
    FACTORS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SPAN: tl.constexpr,
    FLOATS: tl.constexpr,
) -> None:
    """Grid (R, ceil(chunks / CHUNKS))."""
    r = tl.program_id(0).to(tl.int64)
    output = tl.load(ids + r) + tl.zeros([1, 1, 1], tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)[None, :, None]
    held = chunk < K // (PARTS * HALF)
    h = tl.arange(0, HALF)[None, None, :]
    stored = tl.load(codes + output * code_row + (chunk * HALF + h), mask=held, other=0)
    for PART in tl.static_range(PARTS):
        w = weights_of(
            stored, high, scales, minima, factors, moves, output, chunk, held, K, high_row,
            PART, HALF, PARTS, GROUP, BLOCK, OFFSET, MINIMA, FACTORS, HIGH_BITS, SPAN, FLOATS,
        )  # fmt: skip
        tl.store(y + r * K + ((chunk * PARTS + PART) * HALF + h), w.to(y.dtype.element_ty), mask=held)


def group_rows(ids: Tensor, planes: Planes, dtype: torch.dtype) -> Tensor:
    """Rows [R, K] in `dtype` of outputs ids [R] int64."""
    y = torch.empty((len(ids), planes.inputs), dtype=dtype, device=ids.device)
    chunks = TILE_BYTES // planes.layout.half
    if len(ids):
        grid = len(ids), triton.cdiv(planes.inputs // (planes.layout.parts * planes.layout.half), chunks)
        rows_kernel[grid](
            ids, *memory_of(planes), y, planes.inputs, *rows_of(planes), CHUNKS=chunks, **constants(planes), num_warps=1
        )
    return y


def memory_of(planes: Planes) -> tuple[Tensor, ...]:
    return planes.codes, planes.high, planes.scales, planes.minima, planes.factors, planes.moves


def rows_of(planes: Planes) -> tuple[int, int]:
    """Bytes of an output in the planes of codes and of high bits, for Triton to learn what divides them."""
    return planes.codes.stride(0), planes.high.stride(0)


def constants(planes: Planes) -> dict[str, Any]:
    """The constants of the kernels for a type."""
    names = ("half", "parts", "group", "block", "offset", "minima", "factors", "high_bits", "span", "floats")
    return {name.upper(): getattr(planes.layout, name) for name in names}
