"""Prompts over a latent with keys and values of heads: the tokens of transformers, and the choice of the form."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from attention.choice.choose import made
from attention.codes import pool_in
from attention.latent import attend_latent, write_latent
from attention.reference import ReferenceBackend
from cache.block import BlockGeometry
from engine.model import latent_prompts
from engine.model.latent_config import Latent
from engine.model.latent_prompts import LatentPrompts, by_arithmetic, measured
from engine.model.ops.interface import TorchPerHead
from engine.step.runner import Row
from lab.bench.attention.grid import MIXES, Case, far_off
from tests.engine.model.test_families import chunked, their_logits
from tests.engine.model.test_model import TOLERANCE, blocks_for, greedy, their_greedy, tokens
from tests.engine.tiny_families import ours, save
from tests.engine.tiny_llama import logits_of

LENGTH, NEW = 70, 8
FAMILIES = ["deepseek2", "deepseek3", "kimi-k2"]
SIZES = Latent(rank=32, rope_size=16, nope_size=16, value_size=24, prompts="heads")
"""A head's query has 32 elements, its value has 24."""
DEEPSEEK = Latent(rank=512, rope_size=64, nope_size=128, value_size=128)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return save(request.param, directory), directory


def test_logits_and_tokens_equal_transformers(saved):
    """Whole prompts, chunks over a past, decodes between them, and a batch of all of these."""
    theirs, directory = saved
    ids = tokens(LENGTH)
    truth = their_logits(theirs, ids)
    for chunks in ([LENGTH], [16, 30, 1, 1, 22]):
        _, runner = ours(directory, latent_prompts="heads")
        torch.testing.assert_close(chunked(runner, ids, chunks), truth, **TOLERANCE)
    runner = ours(directory, latent_prompts="heads")[1]
    latent = runner.model.layers[0].latent
    assert latent is not None and latent.prompts.takes(16, 46)
    assert greedy(runner, ids, NEW, [40, 30], blocks_for(LENGTH + NEW)) == their_greedy(theirs, ids, NEW)


def test_requests_of_a_batch_do_not_see_each_other(saved):
    theirs, directory = saved
    _, runner = ours(directory, latent_prompts="heads")
    lengths, starts = [33, 50, 1, 64, 22], [0, 13, 0, 63, 21]
    prompts = [tokens(n, seed=n) for n in lengths]
    blocks = [list(range(10 * i, 10 * i + 5))[::-1] for i in range(5)]
    for i, start in enumerate(starts):
        if start:
            logits_of(runner, [Row(prompts[i][:start], 0, blocks[i])])
    rows = [Row(prompts[i][start:], start, blocks[i]) for i, start in enumerate(starts)]
    expected = torch.cat([their_logits(theirs, p)[start:] for p, start in zip(prompts, starts, strict=True)])
    torch.testing.assert_close(logits_of(runner, rows), expected, **TOLERANCE)


def attention_of(case: Case, kv: torch.Tensor, backend: str, dtype: torch.dtype, heads: int) -> tuple[Any, ...]:
    """Both forms of the case's attention, absorbed in float64 and with keys and values in `dtype`:
    [T, heads, value_size]."""
    random = torch.Generator().manual_seed(7)
    to_latent = torch.randn(heads, SIZES.nope_size, SIZES.rank, generator=random) / 4
    to_value = torch.randn(heads, SIZES.rank, SIZES.value_size, generator=random) / 4
    queries = torch.randn(len(case.q), heads, SIZES.query_size, generator=random)
    nope, rope = queries.split((SIZES.nope_size, SIZES.rope_size), 2)

    def absorbed(name: str, dtype: torch.dtype, matrices_in: torch.dtype) -> torch.Tensor:
        one, pool = made(name), kv if kv.dtype in (torch.int8, torch.float8_e4m3fn) else kv.to(dtype, copy=True)
        plan = one.plan(case.batch)
        first, last = TorchPerHead(to_latent.to(matrices_in)), TorchPerHead(to_value.to(matrices_in))
        query = torch.cat((first(nope.to(dtype)), rope.to(dtype)), 2)
        return last(attend_latent(one, query, pool, case.batch, plan, case.scale, SIZES.rank))

    prompts = LatentPrompts(SIZES, heads, case.scale, made(backend))
    split = prompts.split(case.batch)
    assert split is not None
    out = torch.full((len(case.q), heads, SIZES.value_size), torch.nan, dtype=dtype)
    pool = kv if kv.dtype in (torch.int8, torch.float8_e4m3fn) else kv.to(dtype)
    matrices = TorchPerHead(to_latent.to(dtype)), TorchPerHead(to_value.to(dtype))
    for chunk in split.chunks:
        rows = nope[chunk.rows].to(dtype), rope[chunk.rows].to(dtype)
        out[chunk.rows] = prompts.attend(chunk, *rows, pool, *matrices)
    taken = torch.cat([torch.arange(chunk.rows.start, chunk.rows.stop) for chunk in split.chunks])
    truth = absorbed("reference", torch.float64, torch.float64)
    plain = absorbed("reference", dtype, dtype).double() - truth
    return out[taken], truth[taken], float(plain[taken].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_both_forms_are_one_attention(backend, dtype, monkeypatch):
    """Also in groups of heads; slots without a token hold NaN."""
    for mix in ("prefix and chunk", "everything"):
        case = Case([*MIXES[mix], (140, 13)], 6, 1, SIZES.row_size, 16, dtype)
        kv = case.pool[:, 1, :1].contiguous()[:, :1]
        write_latent(made("reference"), case.k[:, 0].to(kv.dtype), kv, case.batch, None)
        ours, truth, off = attention_of(case, kv, backend, dtype, 6)
        assert far_off(ours, truth, off) is None, (mix, far_off(ours, truth, off))
        for heads in (1, 4):  # at a time, with at most 256 tokens; four do not divide six
            block = 2 * latent_prompts.BLOCK_SIZE * 32 * dtype.itemsize
            monkeypatch.setattr(latent_prompts, "ROOM_BYTES", 2 * block * heads)
            again, _, _ = attention_of(case, kv, backend, dtype, 6)
            torch.testing.assert_close(again, ours)
        monkeypatch.undo()


def test_every_group_of_heads_has_a_dense_pool(monkeypatch):
    """The Triton kernels take no other."""
    seen = []

    class Dense(ReferenceBackend):
        def attend(self, q, kv, batch, plan, scale, **options):
            seen.append((q.shape[1], kv.is_contiguous()))
            return super().attend(q, kv, batch, plan, scale, **options)

    case = Case([(40, 13)], 6, 1, SIZES.row_size, 16, torch.float32)
    prompts = LatentPrompts(SIZES, 6, case.scale, Dense())
    (chunk,) = prompts.split(case.batch).chunks
    monkeypatch.setattr(latent_prompts, "ROOM_BYTES", 4 * 2 * latent_prompts.BLOCK_SIZE * 32 * 4)
    kv = case.pool[:, 1, :1].contiguous()[:, :1].nan_to_num(0.0)
    rows = torch.ones(len(case.q), 6, 16), torch.ones(len(case.q), 6, 16)
    prompts.attend(chunk, *rows, kv, TorchPerHead(torch.ones(6, 16, 32)), TorchPerHead(torch.ones(6, 32, 24)))
    assert seen == [(4, True), (4, True)]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantized_rows_become_keys_and_values(kv_dtype):
    case = Case([*MIXES["everything"]], 6, 1, SIZES.row_size, 16, torch.float32)
    geometry = BlockGeometry(1, 1, SIZES.row_size, 16, kv_dtype, kind="latent")
    memory = torch.full((len(case.pool) * geometry.block_bytes,), 0xFF, dtype=torch.uint8)
    kv = pool_in(memory, geometry.shape, kv_dtype)[:, 0]
    reference, random = made("reference"), torch.Generator().manual_seed(3)
    for block in range(len(kv)):
        filled = replace(case.batch, slot_mapping=torch.arange(16) + 16 * block)
        write_latent(reference, torch.randn(16, SIZES.row_size, generator=random), kv, filled, None)
    ours, truth, off = attention_of(case, kv, "cpu", torch.float32, 6)
    assert far_off(ours, truth, off) is None, far_off(ours, truth, off)


def test_a_recorded_step_has_no_shapes_that_follow_from_lengths():
    case = Case([(40, 13)], 6, 1, SIZES.row_size, 16, torch.float32)
    prompts = LatentPrompts(SIZES, 6, case.scale, made("torch"))
    assert prompts.split(case.batch) is not None
    assert prompts.split(replace(case.batch, recorded=True)) is None


@given(rows=st.integers(1, 4096), past=st.integers(0, 100_000))
def test_longer_chunks_and_shorter_pasts_take_keys_and_values_sooner(rows, past):
    auto = LatentPrompts(DEEPSEEK, 128, 0.1, made("torch"))
    if auto.takes(rows, past + rows):
        assert auto.takes(rows + 1, past + rows + 1) and auto.takes(rows, past // 2 + rows)
    assert auto.takes(rows, rows) == (rows >= latent_prompts.LEAST_ROWS), "without a past at any length"
    absorbed = LatentPrompts(replace(DEEPSEEK, prompts="absorbed"), 128, 0.1, made("torch"))
    assert not absorbed.takes(rows, past + rows)


def test_the_arithmetic_of_deepseek():
    """About 186 rows behind a long past: 512 * 256 / (1088 - 384)."""
    auto = LatentPrompts(DEEPSEEK, 128, 0.1, made("torch"))
    assert auto.ratio / 2 == pytest.approx(186.2, abs=0.1)
    assert not auto.takes(185, 1_000_000) and auto.takes(187, 1_000_000)
    assert by_arithmetic(Latent(rank=16, rope_size=16, nope_size=64, value_size=64), 80) == math.inf


def test_the_choice_is_measured_on_a_cpu(caplog):
    caplog.set_level("INFO")
    prompts = LatentPrompts(SIZES, 4, 0.1, made("cpu"))
    matrices = torch.ones(4, 16, 32), torch.ones(4, 32, 24)
    ratio = measured(prompts, *map(TorchPerHead, matrices), torch.float32)
    assert ratio == math.inf or math.log2(ratio).is_integer()
    assert "prompts over a latent" in caplog.text
