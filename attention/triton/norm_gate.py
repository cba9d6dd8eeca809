"""The operations of a decoder layer between its matrix products: RMS norm and the gate of the MLP. The norm may
follow a residual addition. Each kernel reads its inputs once and writes its results once, because memory traffic is
the only cost.

    rms_norm       out = w round(x / sqrt(mean(x^2) + eps))          mean in float32
    add_rms_norm   x' = round(x + delta)    out = rms_norm(x')
    silu_mul       out = round(g / (1 + e^-g)) u                     [g | u] one row of gate_up
    gelu_tanh_mul  out = round(g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))) u

round() rounds to the tensor's own type, at the same places as transformers' Llama. A float32 weight for a narrower x is
multiplied before the only rounding (Gemma).

We have not measured these kernels on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.triton.paging import LOG2_E, tanh

SHORT_ROWS = 1024
"""Elements per program when rows are shorter than this (the heads of a query); a longer row has its own program."""

GATE_WIDTH = 1024
"""Elements of a row per program: 16 bytes of gate and of up per thread."""


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x: tl.tensor,  # [num_rows / HEADS, HEADS, SIZE], last axis dense; with ADD written: x + delta
    delta: tl.tensor,  # [num_rows, SIZE] dense, with ADD only
    weight: tl.tensor,  # [SIZE]
    out: tl.tensor,  # [num_rows, SIZE] dense, written; may be delta's memory
    num_rows: tl.tensor,
    x_row: tl.tensor,  # strides, elements
    x_head: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,  # SIZE rounded up to a power of two
    ROWS: tl.constexpr,  # per program
    ADD: tl.constexpr,
    ROUND: tl.constexpr,  # the quotient is rounded before it meets the weight
) -> None:
    """Grid (ceil(num_rows / ROWS),)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    mine = (row < num_rows) & (d < SIZE)
    place = x + row // HEADS * x_row + row % HEADS * x_head + d
    value = tl.load(place, mask=mine, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * SIZE + d, mask=mine, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(place, rounded, mask=mine)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, 1) / SIZE
    value *= tl.rsqrt(mean + eps)[:, None]
    if ROUND:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + d, mask=d < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + d, value.to(out.dtype.element_ty), mask=mine)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 SIZE], last axis dense
    out: tl.tensor,  # [T, SIZE] dense, written
    row_stride: tl.tensor,  # elements
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid (T, ceil(SIZE / WIDTH))."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mine = i < SIZE
    gate = tl.load(gate_up + t * row_stride + i, mask=mine, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * row_stride + SIZE + i, mask=mine, other=0.0).to(tl.float32)
    if GELU:
        bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (1 + tanh(bent, True))
    else:
        gate = gate / (1 + tl.exp2(-gate * LOG2_E))
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + t * SIZE + i, (gate * up).to(out.dtype.element_ty), mask=mine)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, SIZE] or [T, HEADS, SIZE], last axis dense; weight [SIZE]; out dense, of x's shape and dtype."""
    launch_norm(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> None:
    """x becomes x + delta, delta becomes the norm of that; both [T, SIZE] of one dtype, dense."""
    if x.shape != delta.shape or not x.is_contiguous() or not delta.is_contiguous() or x.dtype != delta.dtype:
        raise ValueError(f"x {tuple(x.shape)} and delta {tuple(delta.shape)} must be dense and have the same shape")
    launch_norm(x, delta, weight, eps, delta)


def launch_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    heads, size = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or not out.is_contiguous() or weight.shape != (size,):
        raise ValueError(f"cannot norm x {tuple(x.shape)} of strides {x.stride()} with weight {tuple(weight.shape)}")
    padded = triton.next_power_of_2(size)
    rows = max(1, SHORT_ROWS // padded)
    num_rows = x.shape[0] * heads
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        out if delta is None else delta,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        HEADS=heads,
        SIZE=size,
        D=padded,
        ROWS=rows,
        ADD=delta is not None,
        ROUND=weight.dtype == x.dtype,
        num_warps=min(max(rows * padded // 512, 1), 16),
    )


def gate_mul(gate_up: Tensor, out: Tensor, *, gelu: bool = False) -> None:
    """gate_up [T, 2 I], last axis dense -> out [T, I] dense; silu, or gelu in its tanh approximation."""
    size = out.shape[1]
    if gate_up.stride(1) != 1 or not out.is_contiguous() or gate_up.shape != (out.shape[0], 2 * size):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [T, 2 I] with a dense last axis")
    width = min(GATE_WIDTH, triton.next_power_of_2(size))
    gate_kernel[(out.shape[0], triton.cdiv(size, width))](
        gate_up, out, gate_up.stride(0), SIZE=size, GELU=gelu, WIDTH=width, num_warps=4
    )
