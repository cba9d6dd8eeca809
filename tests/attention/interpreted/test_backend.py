"""The backend as the engine uses it: mixed batches, several layers, pools of more than 4 GiB."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from attention.reference import ReferenceBackend
from attention.triton.backend import TritonBackend
from attention.triton.tiles import Tile, Tiles
from lab.bench.attention.grid import without_unseen
from tests.attention.interpreted.cases import DEVICE, DTYPES, SMALL, Case, assert_close, attend, make_case
from tests.heavy import one_in

MAP_NORESERVE = 0x4000  # Linux; in the mmap module from Python 3.13

WIDE = Tiles(Tile(16, 32, 4, 2, min_chunk=32), Tile(32, 32, 4, 2))
"""Tiles of keys that span two blocks of 16."""

MIXED = ([1, 1, 1, 6, 40], [80, 1, 33, 6, 57])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_lens", "kv_lens"), [MIXED, ([1, 1], [20, 3]), ([9], [9]), ([], [])], ids=str)
def test_decodes_and_chunks_in_one_batch(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype) -> None:
    case = make_case(q_lens, kv_lens, heads=(9, 3), head_size=64, block_size=16, dtype=dtype)
    backend = TritonBackend(tiles=SMALL)
    out = backend.attend(case.q, case.kv, case.batch, backend.plan(case.batch), case.scale)
    assert out.shape == case.q.shape and out.dtype == dtype
    assert_close(out, attend(case, torch.float64), attend(case, dtype))


def test_the_yardstick_of_these_tests_is_the_reference_backend() -> None:
    case = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float64)
    expected = ReferenceBackend().attend(case.q, case.kv, case.batch, None, case.scale)
    torch.testing.assert_close(attend(case, torch.float64), expected)


def test_one_plan_serves_every_layer() -> None:
    first = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    second = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    second = Case(second.q.flip(0).contiguous(), second.kv, first.batch, second.scale)
    backend = TritonBackend(tiles=SMALL)
    plan = backend.plan(first.batch)
    for case in (first, second):
        out = backend.attend(case.q, case.kv, case.batch, plan, case.scale)
        assert_close(out, attend(case, torch.float64), attend(case, torch.float32))


def test_window_and_soft_cap_reach_both_kernels() -> None:
    case = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    backend = TritonBackend(tiles=SMALL)
    plan = backend.plan(case.batch)
    out = backend.attend(case.q, case.kv, case.batch, plan, case.scale, window=20, soft_cap=5.0)
    assert_close(out, attend(case, torch.float64, 20, 5.0), attend(case, torch.float32, 20, 5.0))


def test_blocks_behind_the_window_are_not_read() -> None:
    """They are other requests' by now. Tiles of keys begin in them, in decodes, in a short chunk and in a long one."""
    for q_lens, kv_lens in (([1, 1], [80, 33]), ([6], [77]), ([90], [150])):
        case = make_case(q_lens, kv_lens, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
        exact, plain = (attend(case, kind, 20) for kind in (torch.float64, torch.float32))
        backend, batch = TritonBackend(tiles=WIDE), without_unseen(case.batch, 20)
        out = backend.attend(case.q, case.kv, batch, backend.plan(batch), case.scale, window=20)
        assert_close(out, exact, plain)


SINKS = torch.tensor([-3.0, 0.0, 2.0, 5.0], device=DEVICE)


@pytest.mark.parametrize(("mask", "dtype"), one_in(4, [(0, 0.0), (20, 5.0)], DTYPES), ids=str)
def test_sinks_reach_every_kernel(mask: tuple[int, float], dtype: torch.dtype) -> None:
    """Decodes and short chunks of one split and of several, chunks of prefill, and a padding row of a CUDA graph."""
    for q_lens, kv_lens in (MIXED, ([1, 1, 1], [200, 3, 0]), ([9, 5], [190, 5]), ([90], [150])):
        case = make_case(q_lens, kv_lens, heads=(4, 2), head_size=64, block_size=16, dtype=dtype)
        backend = TritonBackend(tiles=SMALL)
        options = {"window": mask[0], "soft_cap": mask[1], "sinks": SINKS.to(dtype)}
        out = backend.attend(case.q, case.kv, case.batch, backend.plan(case.batch), case.scale, **options)
        exact, plain = (attend(case, kind, *mask, sinks=SINKS) for kind in (torch.float64, dtype))
        assert_close(out, exact, plain)


def test_a_sink_far_above_all_scores_takes_all_weight() -> None:
    case = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    backend = TritonBackend(tiles=SMALL)
    sinks = torch.tensor([1e4, -1e4, 300.0, 0.0], device=DEVICE)
    out = backend.attend(case.q, case.kv, case.batch, backend.plan(case.batch), case.scale, sinks=sinks)
    assert not out[:, [0, 2]].any()
    assert_close(out[:, 1], attend(case, torch.float64)[:, 1], attend(case, torch.float32)[:, 1])


def test_strided_queries() -> None:
    case = make_case(*MIXED, heads=(4, 2), head_size=64, block_size=16, dtype=torch.float32)
    wide = torch.randn(len(case.q), 8, 64, device=DEVICE)
    wide[:, 2:6] = case.q
    backend = TritonBackend(tiles=SMALL)
    out = backend.attend(wide[:, 2:6], case.kv, case.batch, backend.plan(case.batch), case.scale)
    assert_close(out, attend(case, torch.float64), attend(case, torch.float32))


@pytest.mark.skipif(DEVICE != "cpu", reason="it prepares the interpreter")
def test_the_quick_grid_of_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first steps; scripts/tools.py mutants runs all of those in float32."""
    from tests.attention.interpreted import first_fault

    few = [point for point in first_fault.points(quick=True) if point.dtype == torch.float32][:4]
    monkeypatch.setattr(first_fault, "points", lambda quick: few)
    monkeypatch.setattr(first_fault, "sink_points", list)
    assert len(few) == 4 and first_fault.first_fault() is None
    monkeypatch.setattr(TritonBackend, "attend", lambda self, q, *rest, **options: torch.zeros_like(q))
    step, fault = first_fault.first_fault() or ("", "")
    assert step == str(few[0]) and "is off by" in fault


@pytest.fixture
def sparse() -> Tensor:
    """A pool whose blocks lie 2 GiB apart; on the CPU address space, of which only touched pages are memory."""
    if DEVICE == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, 8 << 30, flags=flags), dtype=torch.bfloat16)
    else:
        flat = torch.zeros(4 << 30, dtype=torch.bfloat16, device=DEVICE)
    layers, kv_heads, block_size, head_size = 2, 2, 16, 64
    layer = 2 * kv_heads * block_size * head_size
    strides = (1 << 30, layer, layer // 2, block_size * head_size, head_size, 1)
    return flat.as_strided((4, layers, 2, kv_heads, block_size, head_size), strides)


@pytest.mark.parametrize(
    "keys",
    [pytest.param(16, id="one block per tile", marks=pytest.mark.heavy), pytest.param(32, id="two blocks per tile")],
)
def test_blocks_beyond_four_gibibytes(sparse: Tensor, keys: int) -> None:
    """Offsets of 2^31 elements and more: written and attended to where they belong."""
    case = make_case([1, 20], [30, 28], heads=(4, 2), head_size=64, block_size=16, dtype=torch.bfloat16)
    expected, plain = attend(case, torch.float64), attend(case, torch.bfloat16)
    order = [3, 1, 2, 0]  # the last blocks first
    tables, kv = case.batch.block_tables, sparse[:, 1]
    k, v = torch.zeros(2, 58, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    slots, row, used = [], 0, 0
    for s, kv_len in enumerate(case.batch.kv_lens):
        for j in range(kv_len):
            k[row], v[row] = case.kv[tables[s, j // 16], :, :, j % 16]
            slots.append(order[used + j // 16] * 16 + j % 16)
            row += 1
        tables[s, :2] = torch.tensor(order[used : used + 2], device=DEVICE)
        used += 2
    backend = TritonBackend(tiles=Tiles(Tile(16, keys, 4, 2), Tile(32, keys, 4, 2)))
    plan = backend.plan(case.batch)
    case.batch.slot_mapping = torch.tensor(slots, device=DEVICE)
    backend.write_kv(k, v, kv, case.batch, plan)
    for row, slot in enumerate(slots):
        assert torch.equal(kv[slot // 16, 0, :, slot % 16], k[row])
        assert torch.equal(kv[slot // 16, 1, :, slot % 16], v[row])
    out = backend.attend(case.q, kv, case.batch, plan, case.scale)
    assert_close(out, expected, plain)


def test_refuses_what_it_cannot_compute() -> None:
    case = make_case([1], [5], heads=(4, 2), head_size=72, block_size=16, dtype=torch.float32)
    backend = TritonBackend()
    with pytest.raises(ValueError, match="head size 72"):
        backend.attend(case.q, case.kv, case.batch, backend.plan(case.batch), 1.0)
    with pytest.raises(ValueError, match="negative"):
        backend.attend(case.q, case.kv, case.batch, backend.plan(case.batch), 1.0, window=-1)
    with pytest.raises(ValueError, match="contiguous"):
        token_major = case.kv.transpose(2, 3).contiguous().transpose(2, 3)
        backend.attend(case.q, token_major, case.batch, backend.plan(case.batch), 1.0)
