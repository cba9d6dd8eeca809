"""Copying KV blocks between the pool and one dense buffer, by number: how blocks leave and enter GPU memory.

A transfer, a tier or a peer wants many blocks as one span. `gather_blocks` lays them side by side in a staging buffer
[N, bytes of a block], from which one copy engine transfer takes them to pinned memory; `scatter_blocks` is the way
back. Both take the whole pool or one layer's slice of it (pool[:, layer]), which is dense within a block.

The bytes are moved as they are, 16 at a time, in units of int32. Offsets are int64: a pool of more than 2^31 units is
ordinary.

Figures on a GPU are still to be measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT_BYTES = 4
VECTOR_BYTES = 16

WIDTH = 4096
"""Units per program: 16 KiB, four 16-byte loads in flight per thread."""


@triton.jit
def copy_kernel(
    pool: tl.tensor,  # int32 units; block b begins at b * block_stride
    staging: tl.tensor,  # [N, SPAN] int32 units, dense
    blocks: tl.tensor,  # [N] int64: which blocks
    block_stride: tl.tensor,  # units
    SPAN: tl.constexpr,  # units of a block, or of one layer's part of it
    TO_POOL: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid (N, ceil(SPAN / WIDTH))."""
    n = tl.program_id(0)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mine = i < SPAN
    in_pool = pool + tl.load(blocks + n).to(tl.int64) * block_stride + i
    in_staging = staging + n.to(tl.int64) * SPAN + i
    if TO_POOL:
        tl.store(in_pool, tl.load(in_staging, mask=mine), mask=mine)
    else:
        tl.store(in_staging, tl.load(in_pool, mask=mine), mask=mine)


def gather_blocks(pool: Tensor, blocks: Tensor, staging: Tensor | None = None) -> Tensor:
    """Blocks of pool [num_blocks, ...], dense within a block, as staging [N, bytes of a block] uint8 (made if None).
    blocks [N] int64, on the pool's device. Raises ValueError on a layout that does not move in 16 bytes."""
    units = units_of(pool)
    if staging is None:
        span = units.shape[1] * UNIT_BYTES
        staging = torch.empty((blocks.shape[0], span), dtype=torch.uint8, device=pool.device)
    copy(units, blocks, staging, to_pool=False)
    return staging


def scatter_blocks(staging: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """The reverse: row i of staging [N, bytes of a block] uint8 becomes block blocks[i] of `pool`. Numbers that occur
    twice race."""
    copy(units_of(pool), blocks, staging, to_pool=True)


def copy(units: Tensor, blocks: Tensor, staging: Tensor, *, to_pool: bool) -> None:
    span = units.shape[1]
    wanted = (blocks.shape[0], span * UNIT_BYTES)
    if staging.dtype != torch.uint8 or tuple(staging.shape) != wanted or not staging.is_contiguous():
        raise ValueError(f"staging must be dense uint8 {list(wanted)}, is {staging.dtype} {list(staging.shape)}")
    if staging.storage_offset() % VECTOR_BYTES:
        raise ValueError("staging must begin at a multiple of 16 bytes")
    if not blocks.shape[0]:
        return
    width = min(WIDTH, triton.next_power_of_2(span))
    copy_kernel[(blocks.shape[0], triton.cdiv(span, width))](
        units,
        staging.view(torch.int32),
        blocks,
        units.stride(0),
        SPAN=span,
        TO_POOL=to_pool,
        WIDTH=width,
        num_warps=8,
    )


def units_of(pool: Tensor) -> Tensor:
    """pool [num_blocks, ...] as int32 [num_blocks, units of a block], without a copy."""
    num_blocks, span = pool.shape[0], pool.shape[1:].numel()
    if num_blocks and not pool[0].is_contiguous():
        raise ValueError(f"every block of the pool must be dense, shape {tuple(pool.shape)} strides {pool.stride()}")
    sizes = (span * pool.itemsize, pool.stride(0) * pool.itemsize, pool.storage_offset() * pool.itemsize)
    if any(size % VECTOR_BYTES for size in sizes):
        raise ValueError(f"size, stride and start of a block must be multiples of 16 bytes, are {sizes}")
    return pool.as_strided((num_blocks, span), (pool.stride(0), 1)).view(torch.int32)
