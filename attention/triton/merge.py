"""The splits of a context, merged into the output of a row: each part weighs 2^lse.

out = sum_i 2^(lse_i - max lse) part_i / sum_i 2^(lse_i - max lse)
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.paging import LOG2_E


@triton.jit
def merge_parts(
    parts: tl.tensor,  # [pieces, STRIDE, HEAD_SIZE] float32
    lse: tl.tensor,  # [pieces, STRIDE] float32, log2; -inf: the row sees no key of this split
    first: tl.tensor,  # the row's pieces first .. last - 1
    last: tl.tensor,
    index: tl.tensor,  # of the row in a piece
    sink: tl.tensor,  # pointer: that of the row's head, with SINKS only
    STRIDE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # splits per turn
    SINKS: tl.constexpr,
) -> tl.tensor:
    """The row's output [D] float32 from its splits, of which one of the first WIDTH at least has a key for it."""
    d = tl.arange(0, D)
    top = tl.zeros([1], tl.float32) if SINKS else tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    if SINKS:  # the first part, of weight 2^sink and without a value
        top += tl.load(sink) * LOG2_E
        total += 1
    for start in range(first, last, WIDTH):
        piece = start + tl.arange(0, WIDTH)
        row = piece.to(tl.int64) * STRIDE + index
        held = piece < last
        weight = tl.load(lse + row, mask=held, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(weight, 0))
        weight = tl.exp2(weight - new_top)
        shrink = tl.exp2(top - new_top)
        mine = held[:, None] & (d < HEAD_SIZE)[None, :]
        part = tl.load(parts + row[:, None] * HEAD_SIZE + d[None, :], mask=mine, other=0.0)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        top = new_top
    return acc / total
