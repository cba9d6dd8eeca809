"""Latent rows by the Triton kernels: written, decoded and prefilled, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.codes import pool_in
from attention.reference import ReferenceBackend, attend_one, tokens_of
from attention.triton.backend import TritonBackend
from attention.triton.latent_tiles import TABLE
from attention.triton.tiles import Tile, Tiles
from cache.block import BlockGeometry
from tests.attention.interpreted.cases import DEVICE, DTYPES, SMALL, Case, assert_close, make_case

MIXED = ([1, 1, 1, 6, 40], [80, 1, 33, 6, 57])
SIZES = [(4, 32, 16, 16), (16, 64, 32, 16), (20, 48, 16, 48), (5, 64, 16, 64)]
"""(heads, rank, rope, block size): 48 is no power of two, 20 and 5 heads are no tile."""


def latent_case(
    q_lens: list[int], kv_lens: list[int], heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype
) -> Case:
    case = make_case(q_lens, kv_lens, heads=(heads, 1), head_size=rank + rope, block_size=block_size, dtype=dtype)
    return Case(case.q, case.kv[:, :1], case.batch, case.scale)


def attended(case: Case, rank: int, dtype: torch.dtype) -> Tensor:
    """The definition, in `dtype`."""
    out, first = [torch.zeros(0, case.q.shape[1], rank, dtype=dtype, device=DEVICE)], 0
    for s, (q_len, kv_len) in enumerate(zip(case.batch.q_lens, case.batch.kv_lens, strict=True)):
        rows, _ = tokens_of(case.kv.expand(-1, 2, -1, -1, -1), case.batch.block_tables[s], kv_len, dtype)
        q = case.q[first : first + q_len].to(dtype)
        out.append(attend_one(q, rows, rows[..., :rank], case.scale))
        first += q_len
    return torch.cat(out)


def check(case: Case, rank: int, tiles: Tiles) -> None:
    backend = TritonBackend(tiles=tiles)
    ours = backend.attend_latent(case.q, case.kv, case.batch, backend.plan(case.batch), case.scale, rank)
    assert ours.shape == (*case.q.shape[:2], rank) and ours.dtype == case.q.dtype
    assert_close(ours, attended(case, rank, torch.float64), attended(case, rank, case.q.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decodes_and_chunks_in_one_batch(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(latent_case(*MIXED, *sizes, dtype), sizes[1], SMALL)


@pytest.mark.parametrize(("q_lens", "kv_lens"), [([1, 1], [200, 3]), ([9], [9]), ([], [])], ids=str)
def test_decodes_or_chunks_alone(q_lens: list[int], kv_lens: list[int]) -> None:
    check(latent_case(q_lens, kv_lens, 4, 32, 16, 16, torch.float32), 32, SMALL)


def test_the_shipped_tiles() -> None:
    """DeepSeek's row; more heads than a program has rows."""
    tiles = TABLE[max(key for key in TABLE if key[0] == 2)]
    check(latent_case([1, 1, 3], [70, 5, 40], 72, 512, 64, 16, torch.bfloat16), 512, tiles)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_codes(kv_dtype: str) -> None:
    """The bytes of the reference, and attention over them."""
    case = latent_case(*MIXED, 4, 32, 16, 16, torch.float32)
    geometry, reference = BlockGeometry(2, 1, 48, 16, kv_dtype, kind="latent"), ReferenceBackend()
    memory = torch.full((len(case.kv) * geometry.block_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    expected = memory.clone()
    kv, theirs = (pool_in(each, geometry.shape, kv_dtype)[:, 1] for each in (memory, expected))
    backend = TritonBackend(tiles=Tiles(Tile(16, 32, 4, 2, min_chunk=32), Tile(32, 32, 4, 2)))
    rows, slots = [], []
    for s, kv_len in enumerate(case.batch.kv_lens):
        tokens = torch.arange(kv_len, device=DEVICE)
        found, _ = tokens_of(case.kv.expand(-1, 2, -1, -1, -1), case.batch.block_tables[s], kv_len, torch.float32)
        rows.append(found[:, 0])
        slots.append(case.batch.block_tables[s, tokens // 16].long() * 16 + tokens % 16)
    batch = case.batch
    batch.slot_mapping = torch.cat(slots)
    backend.write_latent(torch.cat(rows), kv, batch, backend.plan(batch))
    both = theirs.expand(-1, 2, -1, -1, -1)
    reference.write_kv(torch.cat(rows)[:, None], torch.cat(rows)[:, None], both, batch, None)
    assert (memory != expected).float().mean() < 1e-3, "a rounding may go the other way, rarely"
    ours = backend.attend_latent(case.q, kv, batch, backend.plan(batch), case.scale, 32)
    exact, plain = (
        reference.attend(case.q.to(kind), kv.expand(-1, 2, -1, -1, -1), batch, None, case.scale)[..., :32]
        for kind in (torch.float64, torch.float32)
    )
    assert_close(ours, exact, plain)


def test_padding_rows_are_not_written() -> None:
    case = latent_case([1, 2], [5, 2], 4, 32, 16, 16, torch.bfloat16)
    case.batch.slot_mapping[1] = -1
    before, rows = case.kv.clone(), torch.ones(3, 48, dtype=torch.bfloat16, device=DEVICE)
    TritonBackend().write_latent(rows, case.kv, case.batch, None)
    changed = (case.kv.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).nonzero()
    written = sorted(int(block) * 16 + int(offset) for block, _, _, offset in changed)
    assert written == sorted(case.batch.slot_mapping[[0, 2]].tolist())


def test_refuses_what_it_cannot_compute() -> None:
    case = latent_case([1], [5], 4, 24, 16, 16, torch.float32)
    backend = TritonBackend()
    with pytest.raises(ValueError, match="no tile for a latent of 24"):
        backend.attend_latent(case.q, case.kv, case.batch, backend.plan(case.batch), 1.0, 24)
