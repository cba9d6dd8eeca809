"""Long chunks by boxes of keys against float64. The interpreter runs the descriptors; the warp groups are the
compiler's (tests/attention/triton/test_hopper_aot.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention.triton import hopper
from attention.triton.backend import Limits, TritonBackend
from attention.triton.geometry import Geometry
from attention.triton.hopper import LONG, LongWork, long, long_keys, plan_long
from attention.triton.tiles import SM90, TABLE, Tile, Tiles, find_tiles
from tests.attention.interpreted.cases import DEVICE, SMALL, Case, assert_close, attend, make_case

on_hopper = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9, reason="compute capability 9 only"
)
pytestmark = on_hopper

TILE = Tile(64, 32, 4, 2)
CHUNKS = ([150, 64, 3, 0, 100], [150, 130, 40, 20, 291])
"""A prompt that ends inside a tile, one that does not, one without a whole tile, an empty row, and a long prefix."""


def case_of(heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    return make_case(*CHUNKS, heads=heads, head_size=head_size, block_size=block_size, dtype=dtype)


def run(
    case: Case, tile: Tile, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, LongWork]:
    batch, out = case.batch, torch.full_like(case.q, 7.0)
    lens = (batch.q_lens, batch.kv_lens)
    work = plan_long(batch.cu_q, batch.ctx_lens, *lens, tile, tile.keys, processors=5)
    rows = (batch.block_tables, batch.ctx_lens, batch.cu_q)
    long(case.q, case.kv, out, *rows, work, case.scale, tile, soft_cap=soft_cap, sinks=sinks)
    return out, work


def leading(case: Case, tile: Tile) -> list[int]:
    """Queries in whole tiles, by the definition."""
    lens = zip(case.batch.q_lens, case.batch.kv_lens, strict=True)
    return [max(0, min(q, n // tile.keys * tile.keys - (n - q))) // tile.rows * tile.rows for q, n in lens]


def check(case: Case, tile: Tile, soft_cap: float = 0.0, sinks: torch.Tensor | None = None) -> None:
    """Whole tiles are right, and no other row is touched: the pool has NaN in every slot without a token."""
    out, work = run(case, tile, soft_cap, sinks)
    exact, plain = (attend(case, dtype, 0, soft_cap, sinks=sinks) for dtype in (torch.float64, case.q.dtype))
    counts, first = leading(case, tile), case.batch.cu_q.tolist()
    assert work.lead.tolist() == counts and sum(counts) > 0
    assert work.rest.starts.tolist() == [a + n for a, n in zip(first, counts, strict=False)]
    done = torch.zeros(len(out), dtype=torch.bool, device=DEVICE)
    for begin, count in zip(first, counts, strict=False):
        done[begin : begin + count] = True
    assert_close(out[done], exact[done], plain[done])
    assert (out[~done] == 7.0).all()


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3), (6, 1)], ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    check(case_of(heads, 64, 64), TILE)


@pytest.mark.parametrize("block_size", [32, 96, 256])
def test_block_sizes(block_size: int) -> None:
    """Blocks of one tile of keys, of three, and of eight."""
    check(case_of((4, 2), 64, block_size, torch.float16), replace(TILE, persistent=block_size == 96))


def test_persistent_programs_compute_every_tile() -> None:
    """Five programs for 36 tiles of four heads."""
    check(case_of((4, 2), 64, 32), replace(TILE, persistent=True))


def test_sinks() -> None:
    check(case_of((4, 2), 64, 64), TILE, sinks=torch.tensor([-3.0, 0.0, 2.0, 5.0], device=DEVICE))


def test_soft_cap() -> None:
    check(case_of((4, 2), 64, 32), TILE, soft_cap=5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, pytest.param(256, marks=pytest.mark.heavy)])
def test_the_shipped_tiles(head_size: int, dtype: torch.dtype) -> None:
    tile = TABLE[head_size, 2, SM90].long
    assert tile is not None
    for block_size in (tile.keys, 64):
        case = make_case([300], [300], heads=(2, 1), head_size=head_size, block_size=block_size, dtype=dtype)
        check(case, replace(tile, keys=min(tile.keys, block_size)))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks count as long from 60 tokens, and tiles of 32 keys are large enough."""
    monkeypatch.setattr(hopper, "LONG", 60)
    monkeypatch.setattr(hopper, "LEAST_KEYS", 32)


@pytest.mark.usefixtures("early")
def test_the_backend_computes_the_rest_elsewhere() -> None:
    """Decodes, long chunks, their rests and short chunks of one batch."""
    q_lens, kv_lens = [1, 1, *CHUNKS[0]], [80, 33, *CHUNKS[1]]
    case = make_case(q_lens, kv_lens, heads=(4, 2), head_size=64, block_size=32, dtype=torch.bfloat16)
    backend = TritonBackend(tiles=Tiles(Tile(64, 32, 4, 2, min_chunk=64), SMALL.prefill, TILE))
    plan = backend.plan(case.batch)
    out = backend.attend(case.q, case.kv, case.batch, plan, case.scale)
    assert_close(out, attend(case, torch.float64), attend(case, torch.bfloat16))
    (cut,) = plan.cuts.values()
    assert cut.decode is not None and cut.long is not None and cut.short is not None and cut.prefill is None


@pytest.mark.usefixtures("early")
def test_a_chunk_of_whole_tiles_leaves_nothing() -> None:
    case = make_case([128, 64], [256, 64], heads=(2, 1), head_size=64, block_size=32, dtype=torch.bfloat16)
    backend = TritonBackend(tiles=Tiles(SMALL.decode, SMALL.prefill, TILE))
    plan = backend.plan(case.batch)
    out = backend.attend(case.q, case.kv, case.batch, plan, case.scale)
    assert_close(out, attend(case, torch.float64), attend(case, torch.bfloat16))
    assert next(iter(plan.cuts.values())).short is None


@pytest.mark.usefixtures("early")
def test_an_older_gpu_gathers() -> None:
    case = case_of((4, 2), 64, 32)
    backend = TritonBackend(tiles=Tiles(SMALL.decode, Tile(64, 32, 4, 2), TILE), limits=Limits(SM90, 4, hopper=False))
    plan = backend.plan(case.batch)
    out = backend.attend(case.q, case.kv, case.batch, plan, case.scale)
    assert_close(out, attend(case, torch.float64), attend(case, torch.bfloat16))
    assert next(iter(plan.cuts.values())).long is None


def test_which_chunks_are_long() -> None:
    tiles = find_tiles(128, 2, SM90)

    def keys(
        block_size: int = 128,
        longest: int = LONG,
        window: int = 0,
        tiles: Tiles = tiles,
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
        size: int = 128,
    ) -> int:
        q = change(torch.empty(8, 8, size, dtype=dtype, device="meta"))
        kv = torch.empty(4, 3, 2, 2, block_size, size, dtype=torch.bfloat16, device="meta")[:, 1]
        return long_keys(tiles, Geometry.of(q, kv), q, kv, window, longest)

    assert (keys(), keys(64), keys(192), keys(384)) == (128, 64, 64, 128)
    assert keys(32) == keys(16) == keys(48) == 0, "blocks smaller than a box"
    assert keys(longest=LONG - 1) == keys(window=4096) == keys(dtype=torch.float32) == keys(size=80) == 0
    assert keys(tiles=replace(tiles, long=None)) == 0
    assert keys(change=lambda q: q[:, ::2]) == 0, "heads apart"
    assert keys(change=lambda q: q[:, 2:]) == 128, "q of a projection, after other heads"
