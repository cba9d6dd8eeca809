"""Split-KV decode and its merge against float64."""

from __future__ import annotations

import pytest
import torch

from attention.triton.decode import decode, plan_decode
from attention.triton.geometry import Geometry
from attention.triton.tiles import Tile, find_tiles
from tests.attention.interpreted.cases import (
    BLOCK_SIZES,
    HEAD_SIZES,
    HEADS,
    SMALL,
    Case,
    Poisoned,
    assert_close,
    attend,
    grid,
    make_case,
)

LENS = [1, 15, 16, 17, 0, 100]


def run(case: Case, tile: Tile, processors: int = 16, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    poisoned = Poisoned(case.q.shape, case.q.dtype)
    batch = case.batch
    work = plan_decode(batch.ctx_lens, Geometry.of(case.q, case.kv), tile, processors, window)
    decode(
        case.q,
        case.kv,
        poisoned.out,
        batch.block_tables,
        batch.ctx_lens,
        work,
        case.scale,
        tile,
        window=window,
        soft_cap=soft_cap,
    )
    poisoned.assert_untouched()
    return poisoned.out


def check(case: Case, tile: Tile, processors: int = 16, window: int = 0, soft_cap: float = 0.0) -> None:
    ours = run(case, tile, processors, window, soft_cap)
    assert_close(ours, attend(case, torch.float64, window, soft_cap), attend(case, case.q.dtype, window, soft_cap))


@pytest.mark.parametrize(("head_size", "block_size", "dtype"), grid(HEAD_SIZES, BLOCK_SIZES), ids=str)
def test_head_and_block_sizes(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    heads = HEADS[(head_size // 16 + block_size // 16) % len(HEADS)]
    check(make_case([1] * 6, LENS, heads=heads, head_size=head_size, block_size=block_size, dtype=dtype), SMALL.decode)


@pytest.mark.parametrize("heads", [*HEADS, (40, 2), (71, 1)], ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    """40 / 2 pads 20 rows to 32; 71 / 1 needs several programs for one KV head."""
    case = make_case([1] * 3, [3, 70, 33], heads=heads, head_size=64, block_size=16, dtype=torch.bfloat16)
    check(case, Tile(32, 16, 4, 2, min_chunk=32))


@pytest.mark.parametrize("processors", [1, 3, 64])
def test_any_number_of_splits(processors: int) -> None:
    case = make_case([1] * 3, [5, 400, 33], heads=(4, 2), head_size=64, block_size=32, dtype=torch.float32)
    check(case, SMALL.decode, processors)


@pytest.mark.parametrize("window", [1, 16, 30, 1000])
def test_window(window: int) -> None:
    case = make_case([1] * 6, LENS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, SMALL.decode, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    case = make_case([1] * 6, LENS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, SMALL.decode, soft_cap=soft_cap)
    check(case, SMALL.decode, soft_cap=soft_cap, window=20)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_shipped_tiles(head_size: int) -> None:
    tile = find_tiles(head_size, 2, 1 << 20).decode
    case = make_case([1] * 3, [600, 64, 1], heads=(8, 2), head_size=head_size, block_size=16, dtype=torch.bfloat16)
    check(case, tile)


def test_the_pool_may_have_another_type() -> None:
    case = make_case(
        [1] * 3, [40, 5, 16], heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32, kv_dtype=torch.bfloat16
    )
    check(case, SMALL.decode)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([1] * 2, [40, 90], heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    case.q.mul_(1000)
    check(case, SMALL.decode)
