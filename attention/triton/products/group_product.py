"""y = x w^T for weights in groups of inputs, which become floats only in registers (products/group_planes.py).

A program computes OUTPUTS outputs of ROWS rows over a part of the inputs. It reads CHUNKS chunks of codes for each
output, makes of them a tile of weights in the type of x, and multiplies it as the left operand: w x^T, because only the
left operand of Hopper's products may come from registers. A weight is rounded to the type of x as a widened one, and
sums are float32.

With few rows there are fewer programs than multiprocessors, so SPLIT programs share the inputs of an output, and torch
adds their sums in a fixed order.

We have not measured these kernels on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.products.group_planes import Planes
from attention.triton.products.group_weights import TILE_BYTES, constants, memory_of, rows_of, weights_of

PROGRAMS = 256
"""About two for each multiprocessor of an A100 or H100."""

MOST_SPLITS = 8


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of a program."""

    outputs: int
    rows: int
    warps: int
    stages: int


FEW, MANY = ProductTile(64, 16, 4, 4), ProductTile(128, 64, 8, 3)


def tile_for(rows: int) -> ProductTile:
    return FEW if rows <= FEW.rows else MANY


def splits_for(programs: int, steps: int) -> int:
    """Programs that share the inputs of an output."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits * 2 <= PROGRAMS and splits * 2 <= steps:
        splits *= 2
    return splits


@triton.jit(do_not_specialize=["M"])
def group_product_kernel(
    x: tl.tensor,  # [M, K], last axis dense
    codes: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    factors: tl.tensor,
    moves: tl.tensor,
    bias: tl.tensor,  # [N], with BIAS only
    y: tl.tensor,  # [M, N] or [SPLIT, M, N] float32, last axis dense, written
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    code_row: tl.tensor,  # bytes of an output
    high_row: tl.tensor,
    x_row: tl.tensor,  # strides, elements
    y_row: tl.tensor,
    y_split: tl.tensor,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32 operands
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
    """Grid (ceil(N / OUTPUTS), ceil(M / ROWS), SPLIT)."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Rows and outputs behind the last are computed as the last and not written: a mask would make loads narrower.
    output = tl.minimum(n, N - 1).to(tl.int64)[:, None, None]
    row = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * x_row
    all_chunks = K // (PARTS * HALF)
    share = tl.cdiv(tl.cdiv(all_chunks, SPLIT), CHUNKS) * CHUNKS
    first = tl.program_id(2) * share
    end = tl.minimum(first + share, all_chunks)
    c = tl.arange(0, CHUNKS)[None, :, None]
    h = tl.arange(0, HALF)[None, None, :]
    i = tl.arange(0, CHUNKS * HALF)[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for begin in range(first, end, CHUNKS):
        chunk = begin + c
        held = chunk < end
        stored = tl.load(codes + output * code_row + (chunk * HALF + h), mask=held, other=0)
        k = (begin + i // HALF) * (PARTS * HALF) + i % HALF
        for PART in tl.static_range(PARTS):
            w = weights_of(
                stored, high, scales, minima, factors, moves, output, chunk, held, K, high_row,
                PART, HALF, PARTS, GROUP, BLOCK, OFFSET, MINIMA, FACTORS, HIGH_BITS, SPAN, FLOATS,
            )  # fmt: skip
            w = tl.reshape(w.to(x.dtype.element_ty), [OUTPUTS, CHUNKS * HALF])
            rows = tl.load(row + (k + PART * HALF), mask=begin + i // HALF < end, other=0.0)
            acc = tl.dot(w, rows, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = y + tl.program_id(2) * y_split + m.to(tl.int64)[None, :] * y_row + n[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def group_product(x: Tensor, planes: Planes, bias: Tensor | None, y: Tensor) -> None:
    """x [M, K] float32, float16 or bfloat16 -> y [M, N] = x w^T + bias, of any of these types; last axes dense, M at
    least 1."""
    if x.shape != (len(y), planes.inputs) or y.shape[1] != planes.outputs or x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit {planes.outputs, planes.inputs}")
    layout, tile = planes.layout, tile_for(len(x)) if x.itemsize == 2 else FEW
    chunks = TILE_BYTES // layout.half
    grid = triton.cdiv(planes.outputs, tile.outputs), triton.cdiv(len(x), tile.rows)
    steps = triton.cdiv(planes.inputs // (layout.parts * layout.half), chunks)
    splits = splits_for(grid[0], steps) if grid[1] == 1 else 1
    to = y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=y.device)
    group_product_kernel[(*grid, splits)](
        x,
        *memory_of(planes),
        planes.codes if bias is None else bias,
        to,
        len(x),
        planes.outputs,
        planes.inputs,
        *rows_of(planes),
        x.stride(0),
        to.stride(-2),
        to.stride(0) if splits > 1 else 0,
        BIAS=bias is not None and splits == 1,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        CHUNKS=chunks,
        SPLIT=splits,
        PRECISION="ieee",
        **constants(planes),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        summed = to.sum(0)
        y.copy_(summed if bias is None else summed.add_(bias))
