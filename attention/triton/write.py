"""Writes new keys and values into the paged pool, as they are or with rotary embedding.

Token t goes to slot_mapping[t] = block * BLOCK_SIZE + offset. The kernel skips padding rows, which have slot -1. The
rotary form (half-split, as in Llama's checkpoints) rotates the two halves of a head by the angles of the position:

    a' = a cos - b sin        b' = b cos + a sin        cos, sin [T, HEAD_SIZE / 2]

The kernel rotates k on its way into the pool and q in place, so it writes rotated keys only once. A quantized pool gets
codes and the scale of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed, put_rows
from attention.triton.geometry import CODES, head_stride, is_dense_within_block

HEADS_PER_PROGRAM = 8


@triton.jit
def write_kernel(
    k: tl.tensor,  # [T, NUM_KV_HEADS, 2 HALF], last axis dense
    v: tl.tensor,  # the same
    kv: tl.tensor,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, 2 HALF], see geometry.is_dense_within_block; written
    slots: tl.tensor,  # [T] int64
    k_row: tl.tensor,  # strides, elements
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    block_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    HALF: tl.constexpr,  # of the head size
    D: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # elements from one head to the next in a block
    CODES: tl.constexpr,  # of a quantized pool
) -> None:
    """Grid (T, ceil(NUM_KV_HEADS / HEADS))."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    mine = (head < NUM_KV_HEADS) & (d < HALF)
    token = slot % BLOCK_SIZE
    row = kv + slot // BLOCK_SIZE * block_stride + head * HEAD_STRIDE + token * (2 * HALF)
    a, b = halves(k, t * k_row + head * k_head + d, mine, HALF)
    put_rows(row, token, d, a, b, mine, HALF, BLOCK_SIZE, CODES)
    a, b = halves(v, t * v_row + head * v_head + d, mine, HALF)
    put_rows(row + NUM_KV_HEADS * HEAD_STRIDE, token, d, a, b, mine, HALF, BLOCK_SIZE, CODES)


@triton.jit
def halves(x: tl.tensor, offset: tl.tensor, mine: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of the heads at pointer x + offset, float32."""
    a = tl.load(x + offset, mask=mine, other=0.0).to(tl.float32)
    b = tl.load(x + offset + HALF, mask=mine, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def rotate(
    x: tl.tensor, offset: tl.tensor, cos: tl.tensor, sin: tl.tensor, mine: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of the heads at pointer x + offset, rotated, float32."""
    a, b = halves(x, offset, mine, HALF)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotary_kernel(
    q: tl.tensor,  # [T, NUM_HEADS, HEAD_SIZE], last axis dense; rotated in place
    k: tl.tensor,  # [T, NUM_KV_HEADS, HEAD_SIZE], last axis dense
    v: tl.tensor,  # the same
    kv: tl.tensor,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, 2 HALF], see geometry.is_dense_within_block; written
    cos: tl.tensor,  # [T, HALF] float32, dense
    sin: tl.tensor,  # the same
    slots: tl.tensor,  # [T] int64
    q_row: tl.tensor,  # strides, elements
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    block_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    HALF: tl.constexpr,
    D: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # elements from one head to the next in a block
    CODES: tl.constexpr,  # of a quantized pool
) -> None:
    """Grid (T, ceil(NUM_HEADS / HEADS) + ceil(NUM_KV_HEADS / HEADS)): first the heads of q, then those of k and v."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    angle = t * HALF + d
    c = tl.load(cos + angle, mask=d < HALF, other=0.0)
    s = tl.load(sin + angle, mask=d < HALF, other=0.0)
    if tl.program_id(1) < QUERY_TILES:
        mine = (head < NUM_HEADS) & (d < HALF)
        offset = t * q_row + head * q_head + d
        a, b = rotate(q, offset, c, s, mine, HALF)
        tl.store(q + offset, a.to(q.dtype.element_ty), mask=mine)
        tl.store(q + offset + HALF, b.to(q.dtype.element_ty), mask=mine)
    else:
        head -= QUERY_TILES * HEADS
        mine = (head < NUM_KV_HEADS) & (d < HALF)
        a, b = rotate(k, t * k_row + head * k_head + d, c, s, mine, HALF)
        token = slot % BLOCK_SIZE
        row = kv + slot // BLOCK_SIZE * block_stride + head * HEAD_STRIDE + token * (2 * HALF)
        put_rows(row, token, d, a, b, mine, HALF, BLOCK_SIZE, CODES)
        a, b = halves(v, t * v_row + head * v_head + d, mine, HALF)
        put_rows(row + NUM_KV_HEADS * HEAD_STRIDE, token, d, a, b, mine, HALF, BLOCK_SIZE, CODES)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Scatter k, v [T, num_kv_heads, head_size] into kv [num_blocks, 2, num_kv_heads, block_size, head_size] at
    slots [T] int64; the pool may have another element type, or codes."""
    check_layout(kv, k, v)
    _, _, num_kv_heads, block_size, head_size = kv.shape
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_kv_heads))
    write_kernel[(k.shape[0], triton.cdiv(num_kv_heads, heads))](
        k,
        v,
        pointed(kv),
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        HALF=head_size // 2,
        D=triton.next_power_of_2(head_size // 2),
        BLOCK_SIZE=block_size,
        HEAD_STRIDE=head_stride(kv),
        CODES=CODES.get(kv.dtype, 0),
        num_warps=2,
    )


def rotate_and_write_kv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Like write_kv, with k rotated before the write and q [T, num_heads, head_size] rotated in place (except rows of
    slot -1). cos, sin [T, head_size / 2] float32; slots [T] int64."""
    check_layout(kv, q, k, v, cos, sin)
    if cos.stride(0) != kv.shape[4] // 2 or sin.stride(0) != kv.shape[4] // 2:
        raise ValueError(f"cos and sin must be dense [T, {kv.shape[4] // 2}] tables")
    _, _, num_kv_heads, block_size, head_size = kv.shape
    heads = HEADS_PER_PROGRAM
    rotary_kernel[(q.shape[0], triton.cdiv(q.shape[1], heads) + triton.cdiv(num_kv_heads, heads))](
        q,
        k,
        v,
        pointed(kv),
        cos,
        sin,
        slots,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        HALF=head_size // 2,
        D=triton.next_power_of_2(head_size // 2),
        BLOCK_SIZE=block_size,
        HEAD_STRIDE=head_stride(kv),
        CODES=CODES.get(kv.dtype, 0),
        num_warps=2,
    )


def check_layout(kv: Tensor, *dense: Tensor) -> None:
    """Raises ValueError on strides that the kernels cannot follow."""
    if not is_dense_within_block(kv) or any(tensor.stride(-1) != 1 for tensor in dense):
        raise ValueError("the last axis of q, k, v and each layer's part of a block must be contiguous")
