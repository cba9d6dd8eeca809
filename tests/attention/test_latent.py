"""Latent rows by every backend of the CPU, against the definition in float64; slots without a token hold NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.choice.choose import choose, made
from attention.codes import pool_in
from attention.interface import AttentionBackend
from attention.latent import attend_latent, write_latent
from attention.reference import ReferenceBackend, attend_one, tokens_of
from cache.block import BlockGeometry
from lab.bench.attention.grid import DTYPES, MIXES, Case, far_off
from tests.heavy import one_in

BACKENDS = ["cpu", "reference", "torch"]
SIZES = [(4, 32, 16, 16), (16, 64, 32, 16), (3, 16, 16, 32), (20, 512, 64, 16)]
"""(heads, rank, rope, block size)"""

torch.set_num_threads(1)


def case_of(mix: str, heads: int, rank: int, rope: int, block_size: int, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """A step, and one layer's kv [num_blocks, 1, 1, block_size, row] of it."""
    case = Case([*MIXES[mix], (40, 13)], heads, 1, rank + rope, block_size, dtype)
    return case, case.pool[:, 1, :1].contiguous()[:, :1]


def run(backend: AttentionBackend, case: Case, kv: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Write and attend; the rows written are the case's keys."""
    kv, plan = kv.to(dtype, copy=True), backend.plan(case.batch)
    write_latent(backend, case.k[:, 0].to(dtype), kv, case.batch, plan)
    return attend_latent(backend, case.q.to(dtype), kv, case.batch, plan, case.scale, rank)


def defined(case: Case, kv: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The value is the first part of the key."""
    kv, out, first = kv.to(dtype, copy=True), [], 0
    for row, slot in enumerate(case.batch.slot_mapping.tolist()):
        kv[slot // kv.shape[3], 0, 0, slot % kv.shape[3]] = case.k[row, 0].to(dtype)
    for s, (q_len, kv_len) in enumerate(zip(case.batch.q_lens, case.batch.kv_lens, strict=True)):
        rows, _ = tokens_of(kv.expand(-1, 2, -1, -1, -1), case.batch.block_tables[s], kv_len, dtype)
        q = case.q[first : first + q_len].to(dtype)
        out.append(attend_one(q, rows, rows[..., :rank], case.scale))
        first += q_len
    return torch.cat(out)


@pytest.mark.parametrize(("sizes", "dtype"), one_in(2, SIZES, DTYPES), ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_no_further_from_the_truth_than_twice_plain_torch(name, sizes, dtype):
    for mix in ("ragged decodes", "prefix and chunk", "everything"):
        case, kv = case_of(mix, *sizes, dtype)
        rank = sizes[1]
        truth = defined(case, kv, rank, torch.float64)
        plain = float((defined(case, kv, rank, dtype).double() - truth).abs().max())
        ours = run(made(name), case, kv, rank, dtype)
        assert ours.shape == truth.shape and ours.dtype == dtype
        assert far_off(ours, truth, plain) is None, (mix, far_off(ours, truth, plain))


@pytest.mark.parametrize("name", BACKENDS)
def test_writes_its_slots_and_no_other(name):
    case, kv = case_of("everything", 4, 32, 16, 16, torch.bfloat16)
    case.batch.slot_mapping[-3:] = -1  # padding rows
    pool = torch.full((len(kv), 3, 1, 1, 16, 48), torch.nan, dtype=torch.bfloat16)
    expected = pool.clone()
    for row, slot in enumerate(case.batch.slot_mapping.tolist()):
        if slot >= 0:
            expected[slot // 16, 1, 0, 0, slot % 16] = case.k[row, 0]
    backend = made(name)
    write_latent(backend, case.k[:, 0], pool[:, 1], case.batch, backend.plan(case.batch))
    assert torch.equal(pool.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("name", BACKENDS)
def test_quantized_rows_have_one_scale_for_key_and_value(name, kv_dtype):
    """As far from float64 over the same codes as plain torch of the queries' type."""
    case, floats = case_of("everything", 6, 64, 16, 16, torch.float32)
    geometry = BlockGeometry(3, 1, 80, 16, kv_dtype, kind="latent")
    memory = torch.full((len(floats) * geometry.block_bytes,), 0xFF, dtype=torch.uint8)
    kv = pool_in(memory, geometry.shape, kv_dtype)[:, 1]
    backend, reference = made(name), ReferenceBackend()
    past = torch.randn(16, 80, generator=torch.Generator().manual_seed(3))
    for one in (backend, reference):  # the same codes, by either
        plan = one.plan(case.batch)
        for block in range(len(kv)):
            filled = replace(case.batch, slot_mapping=torch.arange(16) + 16 * block)
            write_latent(one, past, kv, filled, one.plan(filled))
        write_latent(one, case.k[:, 0], kv, case.batch, plan)
        if one is backend:
            mine = memory.clone()
    assert (mine != memory).float().mean() < 1e-3, "a rounding may go the other way, rarely"
    truth = attend_latent(reference, case.q.double(), kv, case.batch, None, case.scale, 64)
    plain = attend_latent(reference, case.q, kv, case.batch, None, case.scale, 64)
    ours = attend_latent(backend, case.q, kv, case.batch, backend.plan(case.batch), case.scale, 64)
    off = float((plain.double() - truth).abs().max())
    assert far_off(ours, truth, off) is None, far_off(ours, truth, off)


def test_a_backend_of_heads_needs_no_kernel_of_its_own():
    """What a user's backend sees: an ordinary pool with one head."""

    class Mine(ReferenceBackend):
        name = "mine"

        def attend(self, q, kv, batch, plan, scale, *, window=0, soft_cap=0.0):
            assert kv.shape[1:3] == (2, 1)
            return super().attend(q, kv, batch, plan, scale)

    case, kv = case_of("everything", 4, 32, 16, 16, torch.float32)
    assert torch.equal(run(Mine(), case, kv, 32, torch.float32), run(ReferenceBackend(), case, kv, 32, torch.float32))


def test_the_choice_is_measured_with_the_latent(caplog):
    caplog.set_level("INFO")
    assert choose("auto", "cpu", 576, num_heads=16, num_kv_heads=1, rank=512).name in ("cpu", "torch")
    assert choose("auto", "cpu", 20, num_heads=2, num_kv_heads=1, rank=16).name == "torch"  # no multiple of 16
