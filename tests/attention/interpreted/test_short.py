"""Short queries over a split context against float64."""

from __future__ import annotations

import pytest
import torch

from attention.triton.geometry import Geometry
from attention.triton.short import SHORT, Chunks, ShortWork, is_short, plan_short, short
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

CHUNKS = ([5, 2, 0, 20, 1], [110, 40, 20, 50, 33])
"""A draft over a split context, two tokens, an empty row, two tiles, and a request without a draft."""


def plan(case: Case, tile: Tile, processors: int, window: int = 0) -> ShortWork:
    batch = case.batch
    chunks = Chunks(batch.cu_q, batch.cu_q, len(case.q))
    return plan_short(chunks, batch.cu_q, batch.ctx_lens, Geometry.of(case.q, case.kv), tile, processors, window)


def check(case: Case, tile: Tile, window: int = 0, soft_cap: float = 0.0, processors: int = 24) -> ShortWork:
    poisoned, batch = Poisoned(case.q.shape, case.q.dtype), case.batch
    work = plan(case, tile, processors, window)
    rows = (batch.block_tables, batch.ctx_lens, batch.cu_q)
    short(case.q, case.kv, poisoned.out, *rows, work, case.scale, tile, window=window, soft_cap=soft_cap)
    poisoned.assert_untouched()
    assert_close(poisoned.out, attend(case, torch.float64, window, soft_cap), plain(case, window, soft_cap))
    return work


def pieces(work: ShortWork) -> list[int]:
    first = work.splits.first_piece
    return [int(n) for n in first[1:] - first[:-1]]


@pytest.mark.parametrize(("head_size", "block_size", "dtype"), grid(HEAD_SIZES, BLOCK_SIZES), ids=str)
def test_head_and_block_sizes(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    heads = HEADS[(head_size // 16 + block_size // 16) % len(HEADS)]
    check(make_case(*CHUNKS, heads=heads, head_size=head_size, block_size=block_size, dtype=dtype), SMALL.decode)


@pytest.mark.parametrize("heads", [*HEADS, (40, 2)], ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    """40 / 2 needs two programs for the heads of one token."""
    check(make_case([5, 3], [90, 9], heads=heads, head_size=64, block_size=16, dtype=torch.bfloat16), SMALL.decode)


@pytest.mark.parametrize("window", [1, 50, pytest.param(16, marks=pytest.mark.heavy)])
def test_window(window: int) -> None:
    """Rows of one tile whose windows begin in different splits: some see no key of a split."""
    case = make_case(*CHUNKS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, Tile(32, 16, 4, 2, min_chunk=16), window=window, processors=64)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    case = make_case(*CHUNKS, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    check(case, SMALL.decode, soft_cap=soft_cap, window=20 if soft_cap < 1 else 0)


def test_more_splits_than_one_turn_of_the_merge() -> None:
    """The first rows of the tile see no key of the last split."""
    case = make_case([20], [330], heads=(2, 1), head_size=64, block_size=16, dtype=torch.float32)
    tile = Tile(64, 16, 4, 2, min_chunk=16)
    assert pieces(check(case, tile, processors=64))[0] > 16


def test_the_context_fills_the_machine() -> None:
    """One request with a draft: as many programs as the device runs, not one per KV head."""
    case = make_case([5], [1000], heads=(4, 2), head_size=64, block_size=16, dtype=torch.bfloat16)
    work = check(case, Tile(64, 16, 4, 2, min_chunk=32), processors=32)
    assert pieces(work)[0] == 16 and int(work.splits.chunk) == 64


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_shipped_tiles(head_size: int) -> None:
    tile = find_tiles(head_size, 2, 1 << 20).short
    check(make_case([6, 20], [700, 30], heads=(8, 2), head_size=head_size, block_size=16, dtype=torch.bfloat16), tile)


def test_which_chunks_are_short() -> None:
    geometry = Geometry(32, 8, 128, 16, torch.bfloat16, 16 * 128, 0)
    tile = Tile(128, 64, 8, 3)
    assert is_short(1, 5, 5, geometry, tile, 132) and is_short(64, 64 * SHORT, SHORT, geometry, tile, 132)
    assert is_short(1, 256, 256, geometry, tile, 132), "prefill would run on half of the machine"
    assert not is_short(1, 2048, 2048, geometry, tile, 132)
    assert not is_short(64, 64 * (SHORT + 1), SHORT + 1, geometry, tile, 132)
    assert is_short(4, 16, 0, geometry, tile, 132), "a recorded step does not know its chunks, only their rows"


def test_rows_after_the_first_of_a_chunk() -> None:
    """What attention/triton/hopper.py leaves: the last rows of each chunk, the others stay untouched."""
    case = make_case([30, 9], [80, 9], heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    batch, left = case.batch, torch.tensor([7, 9], dtype=torch.int32, device=DEVICE)
    starts = batch.cu_q[1:] - left
    geometry = Geometry.of(case.q, case.kv)
    work = plan_short(Chunks(starts, left, 16), batch.cu_q, batch.ctx_lens, geometry, SMALL.decode, 24, 0)
    out = torch.full_like(case.q, 7.0)
    short(case.q, case.kv, out, batch.block_tables, batch.ctx_lens, batch.cu_q, work, case.scale, SMALL.decode)
    exact, plain = attend(case, torch.float64), attend(case, torch.float32)
    assert_close(out[23:], exact[23:], plain[23:])
    assert (out[:23] == 7.0).all()
