"""Writes latent rows into the paged pool: row t goes to slot_mapping[t] = block * BLOCK_SIZE + offset.

Rows with slot -1 are skipped. A quantized pool gets codes and the scale of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed, put_rows
from attention.triton.geometry import CODES
from attention.triton.write import halves


@triton.jit
def latent_write_kernel(
    rows: tl.tensor,  # [T, 2 HALF], last axis dense
    kv: tl.tensor,  # [num_blocks, 1, 1, BLOCK_SIZE, 2 HALF], dense within a block; written
    slots: tl.tensor,  # [T] int64
    row_stride: tl.tensor,  # elements
    block_stride: tl.tensor,
    HALF: tl.constexpr,  # of a row
    D: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,  # of a quantized pool
) -> None:
    """Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    d = tl.arange(0, D)[None, :]
    mine = d < HALF
    a, b = halves(rows, t * row_stride + d, mine, HALF)
    token = slot % BLOCK_SIZE
    place = kv + slot // BLOCK_SIZE * block_stride + token * (2 * HALF) + tl.zeros([1, 1], tl.int64)
    put_rows(place, token, d, a, b, mine, HALF, BLOCK_SIZE, CODES)


def write_latent(rows: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Scatter rows [T, row] into kv [num_blocks, 1, 1, block_size, row] at slots [T] int64; the pool may have another
    element type, or codes. Raises ValueError on a layout that the kernel cannot follow."""
    block_size, size = kv.shape[3:]
    if kv.shape[1:3] != (1, 1) or kv.stride()[3:] != (size, 1) or rows.shape[1:] != (size,) or rows.stride(1) != 1:
        raise ValueError(f"rows {tuple(rows.shape)} and kv {tuple(kv.shape)} must be of one size and contiguous")
    latent_write_kernel[(rows.shape[0],)](
        rows,
        pointed(kv),
        slots,
        rows.stride(0),
        kv.stride(0),
        HALF=size // 2,
        D=triton.next_power_of_2(size // 2),
        BLOCK_SIZE=block_size,
        CODES=CODES.get(kv.dtype, 0),
        num_warps=2,
    )
