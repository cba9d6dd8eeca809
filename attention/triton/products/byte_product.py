"""y = x w^T for weights of one byte, int8 or fp8 (e4m3), with float32 scales.

    int8    w = s q    s for each output. Rows of x are rounded to signed bytes, x = e c with e = max |x| / 127, and the
                       sums of q c are exact
    fp8     w = s q    s for each output and 128 inputs. On GPUs with products of fp8 (from compute capability 8.9 on)
                       rows of x are rounded to fp8 with a scale for 128 inputs; on others, q is widened in registers
                       and rows are not rounded

A product of SHARED inputs is multiplied by its scales in float32 before it is added, so that sums in the tensor cores,
which keep few bits for fp8, are short. group_product.py describes tiles and splits.

We have not measured these kernels on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import TINY, to_e4m3, to_int8, widen
from attention.triton.products.group_product import FEW, splits_for, tile_for

SHARED = 128
"""Inputs with one scale of fp8; also those of a turn of int8."""

ROUNDED_AT_ONCE = 1024

INT8, FP8, WIDENED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of the constexpr MODE: the products."""


@triton.jit
def round_kernel(
    x: tl.tensor,  # [M, K], last axis dense
    codes: tl.tensor,  # [M, K] dense, int8 or the bytes of e4m3, written
    scales: tl.tensor,  # [M, groups] dense float32, written
    K: tl.tensor,
    x_row: tl.tensor,  # stride, elements
    groups: tl.tensor,
    GROUP: tl.constexpr,  # inputs with one scale; 0: all
    WIDTH: tl.constexpr,
    FLOATS: tl.constexpr,
) -> None:
    """Grid (M, groups)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, K) if GROUP > 0 else K
    i = tl.arange(0, WIDTH)
    top = tl.zeros([WIDTH], tl.float32)
    for at in range(first, end, WIDTH):
        part = tl.load(x + row * x_row + at + i, mask=at + i < end, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(part))
    LARGEST: tl.constexpr = 448.0 if FLOATS else 127.0
    scale = tl.maximum(tl.div_rn(tl.max(top, 0), tl.full([], LARGEST, tl.float32)), TINY)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
    tl.store(scales + row * groups + group, scale)
    for at in range(first, end, WIDTH):
        part = tl.load(x + row * x_row + at + i, mask=at + i < end, other=0.0).to(tl.float32) * inverse
        tl.store(codes + row * K + at + i, to_e4m3(part) if FLOATS else to_int8(part), mask=at + i < end)


@triton.jit(do_not_specialize=["M"])
def byte_product_kernel(
    x: tl.tensor,  # [M, K], last axis dense: int8, e4m3, or with MODE WIDENED floats
    steps: tl.tensor,  # [M] (int8) or [M, groups] (fp8) float32, dense: scales of the rows
    codes: tl.tensor,  # [N, K] dense: int8, e4m3, or with MODE WIDENED the bytes of e4m3
    scales: tl.tensor,  # [N] (int8) or [N, groups] (fp8) float32, dense
    bias: tl.tensor,  # [N], with BIAS only
    y: tl.tensor,  # [M, N] or [SPLIT, M, N] float32, last axis dense, written
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row: tl.tensor,  # strides, elements
    y_row: tl.tensor,
    y_split: tl.tensor,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,  # of a turn; those with one scale
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32 operands
    MODE: tl.constexpr,
    CODES: tl.constexpr,  # of attention/triton/codes.py, with MODE WIDENED
) -> None:
    """Grid (ceil(N / OUTPUTS), ceil(M / ROWS), SPLIT)."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # As in group_product_kernel.
    output = tl.minimum(n, N - 1).to(tl.int64)
    row = tl.minimum(m, M - 1).to(tl.int64)
    groups = tl.cdiv(K, INPUTS)
    share = tl.cdiv(groups, SPLIT)
    first = tl.program_id(2) * share
    k = tl.arange(0, INPUTS)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    sums = tl.zeros([OUTPUTS, ROWS], tl.int32)
    for group in range(first, tl.minimum(first + share, groups)):
        held = group * INPUTS + k < K
        q = tl.load(codes + output[:, None] * K + (group * INPUTS + k)[None, :], mask=held[None, :], other=0.0)
        c = tl.load(x + row[None, :] * x_row + (group * INPUTS + k)[:, None], mask=held[:, None], other=0.0)
        if MODE == INT8:
            sums = tl.dot(q, c, sums, out_dtype=tl.int32)
        else:
            if MODE == WIDENED:
                q = widen(q, c.dtype, CODES)
            part = tl.dot(q, c, input_precision=PRECISION)
            s = tl.load(scales + output * groups + group)
            if MODE == WIDENED:
                acc += part * (s * 256.0)[:, None]  # `widen` gives 2^-8 of the values
            else:
                acc += part * s[:, None] * tl.load(steps + row * groups + group)[None, :]
    if MODE == INT8:
        acc = sums.to(tl.float32) * tl.load(scales + output)[:, None] * tl.load(steps + row)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = y + tl.program_id(2) * y_split + m.to(tl.int64)[None, :] * y_row + n[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def rounded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x [M, K], last axis dense, M at least 1 -> codes [M, K] int8 or float8_e4m3fn, and their scales float32 [M, 1] or
    [M, ceil(K / 128)]."""
    rows, inputs = x.shape
    floats = kind == "fp8"
    groups = triton.cdiv(inputs, SHARED) if floats else 1
    codes = torch.empty((rows, inputs), dtype=torch.uint8 if floats else torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    round_kernel[(rows, groups)](
        x,
        codes,
        scales,
        inputs,
        x.stride(0),
        groups,
        GROUP=SHARED if floats else 0,
        WIDTH=SHARED if floats else min(ROUNDED_AT_ONCE, triton.next_power_of_2(inputs)),
        FLOATS=floats,
        num_warps=1 if floats else 4,
    )
    return codes.view(torch.float8_e4m3fn) if floats else codes, scales


def byte_product(
    x: Tensor, kind: str, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor, *, fp8_rows: bool
) -> None:
    """x [M, K] float32, float16 or bfloat16 -> y [M, N] = x w^T + bias, of any of these types; last axes dense, M at
    least 1. codes uint8 [N, K] and scales float32 [N, 1] (int8) or [N, ceil(K / 128)] (fp8), dense. fp8_rows: the GPU
    multiplies fp8."""
    if x.shape != (len(y), codes.shape[1]) or y.shape[1] != len(codes) or x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit {tuple(codes.shape)}")
    mode = 0 if kind == "int8" else 1 if fp8_rows else 2
    rows, steps = (x, scales) if mode == 2 else rounded(x, kind)
    tile = tile_for(len(x)) if x.itemsize == 2 or mode < 2 else FEW
    grid = triton.cdiv(len(codes), tile.outputs), triton.cdiv(len(x), tile.rows)
    splits = splits_for(grid[0], triton.cdiv(codes.shape[1], SHARED)) if grid[1] == 1 else 1
    to = y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=y.device)
    byte_product_kernel[(*grid, splits)](
        rows,
        steps,
        codes.view((torch.int8, torch.float8_e4m3fn, torch.uint8)[mode]),
        scales,
        codes if bias is None else bias,
        to,
        len(x),
        len(codes),
        codes.shape[1],
        rows.stride(0),
        to.stride(-2),
        to.stride(0) if splits > 1 else 0,
        BIAS=bias is not None and splits == 1,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        INPUTS=SHARED,
        SPLIT=splits,
        PRECISION="ieee",
        MODE=mode,
        CODES=2,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        summed = to.sum(0)
        y.copy_(summed if bias is None else summed.add_(bias))
