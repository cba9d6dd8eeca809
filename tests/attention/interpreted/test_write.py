"""Writing keys and values into the pool: where they belong, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.triton.write import rotate_and_write_kv, write_kv
from tests.attention.interpreted.cases import DEVICE, DTYPES, HEADS, grid

SLOTS = [37, -1, 0, 95, 64, -1, 5]
SENTINEL = 7.0


def make_pool(num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """Enough blocks for the slots, three layers."""
    return torch.full(
        (1 + 95 // block_size, 3, 2, num_kv_heads, block_size, head_size), SENTINEL, dtype=dtype, device=DEVICE
    )


def scatter(pool: Tensor, layer: int, k: Tensor, v: Tensor) -> Tensor:
    """A copy of `pool` with k and v at SLOTS of `layer`."""
    pool = pool.clone()
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            block, offset = divmod(slot, pool.shape[4])
            pool[block, layer, 0, :, offset] = k[row].to(pool.dtype)
            pool[block, layer, 1, :, offset] = v[row].to(pool.dtype)
    return pool


def projections(heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as strided views of one projection."""
    qkv = torch.randn(len(SLOTS), heads[0] + 2 * heads[1], head_size, generator=torch.Generator().manual_seed(1))
    q, k, v = qkv.to(DEVICE, dtype).split([heads[0], heads[1], heads[1]], 1)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 48), (96, 32), (128, 128), (256, 16)])
def test_write(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    for heads in (*HEADS, (20, 20)):
        _, k, v = projections(heads, head_size, dtype)
        pool = make_pool(heads[1], block_size, head_size, dtype)
        expected = scatter(pool, 1, k, v)
        write_kv(k, v, pool[:, 1], torch.tensor(SLOTS, device=DEVICE))
        assert torch.equal(pool, expected)


def test_write_into_another_type() -> None:
    _, k, v = projections((4, 2), 64, torch.float32)
    pool = make_pool(2, 16, 64, torch.bfloat16)
    expected = scatter(pool, 1, k, v)
    write_kv(k, v, pool[:, 1], torch.tensor(SLOTS, device=DEVICE))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("heads", "head_size", "dtype"), grid(HEADS, [64, 80, 128]), ids=str)
def test_rotate_and_write(heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> None:
    q, k, v = projections(heads, head_size, dtype)
    positions = torch.tensor([0, 3, 1, 500, 7, 7, 2], device=DEVICE)
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, dtype=torch.float64, device=DEVICE) / head_size)
    angle = torch.arange(512, dtype=torch.float64, device=DEVICE)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def rotated(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, -1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    pool = make_pool(heads[1], 16, head_size, dtype)
    expected_pool, expected_q, old_q, old_k = scatter(pool, 1, rotated(k), v), rotated(q), q.clone(), k.clone()
    rotate_and_write_kv(
        q, k, v, cos[positions].float(), sin[positions].float(), pool[:, 1], torch.tensor(SLOTS, device=DEVICE)
    )

    written = torch.tensor([slot >= 0 for slot in SLOTS], device=DEVICE)
    tolerance = {"atol": 4 * torch.finfo(dtype).eps, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(q[written].double(), expected_q[written], **tolerance)
    assert torch.equal(q[~written], old_q[~written]) and torch.equal(k, old_k)
    torch.testing.assert_close(pool, expected_pool, **tolerance)
    untouched = torch.full_like(pool, SENTINEL)
    assert torch.equal(pool == SENTINEL, scatter(untouched, 1, rotated(k), v) == SENTINEL)


def test_refuses_what_it_cannot_follow() -> None:
    _, k, v = projections((4, 2), 64, torch.float32)
    pool = make_pool(2, 16, 64, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(k, v, pool[:, 1].transpose(2, 3), torch.tensor(SLOTS, device=DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        write_kv(k.transpose(1, 2), v, pool[:, 1], torch.tensor(SLOTS, device=DEVICE))
