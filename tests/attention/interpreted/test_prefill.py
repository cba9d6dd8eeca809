"""Chunked prefill over a paged prefix against float64."""

from __future__ import annotations

import pytest
import torch

from attention.triton.geometry import Geometry
from attention.triton.prefill import plan_prefill, prefill
from attention.triton.tiles import Tile, find_tiles
from tests.attention.interpreted.cases import (
    BLOCK_SIZES,
    DEVICE,
    HEAD_SIZES,
    HEADS,
    SMALL,
    Case,
    Poisoned,
    assert_close,
    attend,
    grid,
    make_case,
    plain,
)

CHUNKS = ([17, 2, 0, 33], [17, 40, 20, 70])
"""A prompt, two tokens after a prefix, an empty row, a long chunk over a prefix."""


def run(case: Case, tile: Tile, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
    poisoned = Poisoned(case.q.shape, case.q.dtype)
    batch = case.batch
    work = plan_prefill(batch.cu_q, len(case.q), Geometry.of(case.q, case.kv), tile)
    prefill(
        case.q,
        case.kv,
        poisoned.out,
        batch.block_tables,
        batch.ctx_lens,
        batch.cu_q,
        work,
        case.scale,
        tile,
        window=window,
        soft_cap=soft_cap,
    )
    poisoned.assert_untouched()
    return poisoned.out


def check(case: Case, tile: Tile, window: int = 0, soft_cap: float = 0.0) -> None:
    ours = run(case, tile, window, soft_cap)
    assert_close(ours, attend(case, torch.float64, window, soft_cap), plain(case, window, soft_cap))


@pytest.mark.parametrize(("head_size", "block_size", "dtype"), grid(HEAD_SIZES, BLOCK_SIZES), ids=str)
def test_head_and_block_sizes(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    heads = HEADS[(head_size // 16 + block_size // 16) % len(HEADS)]
    tile = Tile(64, 32, 4, 2) if head_size > 64 else SMALL.prefill
    check(make_case(*CHUNKS, heads=heads, head_size=head_size, block_size=block_size, dtype=dtype), tile)


@pytest.mark.parametrize("heads", [*HEADS, (40, 2), (71, 1)], ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    """40 / 2 leaves 12 of 32 rows idle; 71 / 1 needs several programs for one token's heads."""
    case = make_case([5, 1], [20, 9], heads=heads, head_size=64, block_size=16, dtype=torch.bfloat16)
    check(case, SMALL.prefill)


@pytest.mark.parametrize("window", [1, 16, 30, 1000])
def test_window(window: int) -> None:
    case = make_case(*CHUNKS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, SMALL.prefill, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    case = make_case(*CHUNKS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, SMALL.prefill, soft_cap=soft_cap)
    check(case, SMALL.prefill, soft_cap=soft_cap, window=20)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_shipped_tiles(head_size: int) -> None:
    tile = find_tiles(head_size, 2, 1 << 20).prefill
    case = make_case([100, 40], [300, 40], heads=(8, 2), head_size=head_size, block_size=16, dtype=torch.bfloat16)
    check(case, tile)


def test_chunks_add_up_to_the_whole() -> None:
    """Prefilled at once or in chunks over its own prefix, a prompt gives the same rows."""
    whole = make_case([50], [50], heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    expected = run(whole, SMALL.prefill)
    for start, end in ((0, 7), (7, 39), (39, 50)):
        batch = whole.batch
        batch.cu_q = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        batch.ctx_lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        part = run(Case(whole.q[start:end], whole.kv, batch, whole.scale), SMALL.prefill)
        torch.testing.assert_close(part, expected[start:end])
