"""Gathering blocks into a staging buffer and scattering them back: every byte, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.copy import gather_blocks, scatter_blocks
from tests.attention.interpreted.cases import DEVICE, DTYPES


def make_pool(dtype: torch.dtype, block_size: int = 16, head_size: int = 64) -> Tensor:
    """Six blocks of three layers and two KV heads; random bits, NaN among them."""
    shape = (6, 3, 2, 2, block_size, head_size)
    generator = torch.Generator().manual_seed(block_size + head_size)
    bits = torch.randint(0, 256, (*shape[:-1], head_size * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return bits.to(DEVICE).view(dtype)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (48, 80), (256, 96)])
def test_whole_blocks_there_and_back(block_size: int, head_size: int, dtype: torch.dtype) -> None:
    pool, blocks = make_pool(dtype, block_size, head_size), torch.tensor([4, 0, 5], device=DEVICE)
    staging = gather_blocks(pool, blocks)
    assert torch.equal(staging, raw(pool[blocks]).view(3, -1))
    target = torch.zeros_like(pool)
    scatter_blocks(staging, target, torch.tensor([1, 2, 3], device=DEVICE))
    assert torch.equal(raw(target[1:4]), raw(pool[blocks]))
    assert not raw(target[[0, 4, 5]]).any()


def test_one_layer_of_every_block() -> None:
    pool, blocks = make_pool(torch.bfloat16), torch.tensor([2, 5], device=DEVICE)
    before = raw(pool).clone()
    staging = gather_blocks(pool[:, 1], blocks)
    assert torch.equal(staging, raw(pool[blocks, 1]).view(2, -1))
    scatter_blocks(staging, pool[:, 2], torch.tensor([0, 1], device=DEVICE))
    assert torch.equal(raw(pool[:2, 2]), raw(pool[blocks, 1]))
    changed = (raw(pool) != before).flatten(2).any(-1)  # [block, layer]
    assert changed.nonzero().tolist() == [[0, 2], [1, 2]]


def test_a_given_buffer_and_none_at_all() -> None:
    pool = make_pool(torch.float32)
    span = pool[0].nbytes
    around = torch.full((3, span), 9, dtype=torch.uint8, device=DEVICE)
    assert gather_blocks(pool, torch.tensor([3], device=DEVICE), around[1:2]).data_ptr() == around[1].data_ptr()
    assert torch.equal(around[1], raw(pool[3]).flatten()) and (around[[0, 2]] == 9).all()
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert gather_blocks(pool, none).shape == (0, span)


def test_refuses_what_does_not_move_in_sixteen_bytes() -> None:
    blocks = torch.tensor([0], device=DEVICE)
    pool = make_pool(torch.float32)
    with pytest.raises(ValueError, match="dense, shape"):
        gather_blocks(pool.transpose(4, 5), blocks)
    with pytest.raises(ValueError, match="multiples of 16"):
        gather_blocks(torch.zeros(4, 6, device=DEVICE), blocks)
    with pytest.raises(ValueError, match="staging"):
        scatter_blocks(torch.zeros(1, 8, dtype=torch.uint8, device=DEVICE), pool, blocks)
