"""Rows of a quantized pool for the Triton kernels: the numbers and the layout of attention/codes.py.

    K:  scores_j = scale_j (q . codes_j)          V:  out = sum_j (p_j scale_j) codes_j

Codes are exact in every type that q may have, so the products use them unchanged. The scales multiply scores and
weights, which are fewer. The scales also do half of the work of e4m3: with its bits moved to those of a float16, a code
is 2^-8 of its value, because the exponents' biases are 7 and 15. sm_80 has no instruction for e4m3, so pointers are to
uint8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS, INT8, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of the constexpr CODES for a pool; geometry.CODES maps types to them."""

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def pointed(kv: Tensor) -> Tensor:
    """The pool as the kernels' pointer type."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """x [..] float32, |x| <= 448 -> uint8 codes of torch.float8_e4m3fn, rounded to nearest even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # This drops 20 of float32's 23 mantissa bits; 960 = (127 - 7) << 3 moves the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the codes are multiples of 2^-9: the unit of float32 at 2^14, so one addition rounds.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """x [..] float32, |x| <= 127 -> int8 codes, rounded to nearest even."""
    # 1.5 * 2^23: the float32 whose unit is 1, so that the addition rounds.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def scale_place(row: tl.tensor, offset: tl.tensor, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Pointers to the scales of rows whose codes begin at `row`, at index `offset` in their blocks."""
    return (row + (BLOCK_SIZE - offset) * HEAD_SIZE + offset * 4).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def read_scales(
    row: tl.tensor, offset: tl.tensor, held: tl.tensor, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 factors for the results of `widen`; 0 where `held` is False."""
    scale = tl.load(scale_place(row, offset, HEAD_SIZE, BLOCK_SIZE), mask=held, other=0.0)
    if CODES == E4M3:
        scale = scale * 256.0
    return scale


@triton.jit
def widen(codes: tl.tensor, TYPE: tl.constexpr, CODES: tl.constexpr) -> tl.tensor:
    """Codes in the type of the product, exact."""
    if CODES == E4M3:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32).to(TYPE)
    else:
        values = codes.to(tl.float32).to(TYPE)
    return values


@triton.jit
def put_rows(
    row: tl.tensor,  # [HEADS, 1] pointers to the starts of the rows
    offset: tl.tensor,  # index of the token in its block
    d: tl.tensor,  # [1, D]
    a: tl.tensor,  # [HEADS, D] float32: the first halves of the rows, zero where not mine
    b: tl.tensor,  # the second halves
    mine: tl.tensor,  # [HEADS, D]
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
) -> None:
    """Write the rows of one token into the pool, in its type, with their scales if it is quantized."""
    if CODES == FLOATS:
        tl.store(row + d, a.to(row.dtype.element_ty), mask=mine)
        tl.store(row + HALF + d, b.to(row.dtype.element_ty), mask=mine)
    else:
        top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1, keep_dims=True)
        LARGEST: tl.constexpr = 448.0 if CODES == E4M3 else 127.0
        scale = tl.maximum(tl.div_rn(top, tl.full([], LARGEST, tl.float32)), TINY)
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
        scale += tl.sum((a + b) * 0.0, 1, keep_dims=True)  # NaN if any of them is: a maximum would hide it
        held = tl.max(mine.to(tl.int32), 1, keep_dims=True) > 0
        tl.store(scale_place(row, offset, 2 * HALF, BLOCK_SIZE), scale, mask=held)
        a, b = a * inverse, b * inverse
        tl.store(row + d, to_e4m3(a) if CODES == E4M3 else to_int8(a), mask=mine)
        tl.store(row + HALF + d, to_e4m3(b) if CODES == E4M3 else to_int8(b), mask=mine)
