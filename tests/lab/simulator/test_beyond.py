"""Decode beyond memory: steps against what they must be at least, and a block of batches against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.ablations.decoding import beyond as contexts
from lab.ablations.decoding import flexgen
from lab.ablations.decoding.case import ContextCase
from lab.simulator.models.beyond import BlockOfBatches, Lies, Machine, Opt, Tiers, context_step_s, lies
from lab.simulator.models.step_models import StepModel
from sched.beyond import Room

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 1e-2, 0.0, 1e-6), token_bytes=1000, kv_tokens=10_000,
    chunk_tokens=1000, nic_bytes_s=1e9,
)  # fmt: skip
"""A step takes 10 ms and a microsecond per token of context."""
LAYERS = 10
ROOM = Room(block_size=10, block_bytes=10_000, hot_blocks=100, window_blocks=12, near_blocks=50, far_blocks=10_000)
FAST = Tiers(near_bytes_s=1e15, far_bytes_s=1e15, latency_s=0.0)


def test_without_cold_blocks_a_step_is_the_models():
    assert context_step_s(MODEL, LAYERS, ROOM, 1000, FAST) == pytest.approx(MODEL.decode_s(1, 1000))
    assert context_step_s(MODEL, LAYERS, ROOM, 9000, FAST) == pytest.approx(MODEL.decode_s(1, 9000)), (
        "reads cost nothing"
    )


def test_dram_is_read_where_it_lies_and_the_tier_ahead():
    near = Tiers(near_bytes_s=1e7, far_bytes_s=1e15, latency_s=0.0)
    whole = MODEL.decode_s(1, 1500)
    assert context_step_s(MODEL, LAYERS, ROOM, 1500, near) == pytest.approx(whole + 500_000 / 1e7)
    hidden = replace(FAST, far_bytes_s=2e9)  # 8 MB in 4 ms, behind 19.5 ms of computation
    assert context_step_s(MODEL, LAYERS, ROOM, 9500, hidden) == pytest.approx(MODEL.decode_s(1, 9500), rel=0.02)
    slow = replace(FAST, far_bytes_s=1e7)
    assert context_step_s(MODEL, LAYERS, ROOM, 9500, slow) == pytest.approx(0.8, rel=0.02), "reading alone"


def test_a_piece_is_filled_only_when_its_room_is_free():
    """One layer of 4 blocks of the window fills in 4 ms and is computed with in 4 ms: one of them hides the other; with
    a layer of many pieces the reader is two ahead, and no more."""
    room = Room(block_size=10, block_bytes=10_000, hot_blocks=2, window_blocks=3, near_blocks=1, far_blocks=10_000)
    model = replace(MODEL, decode=(0.0, 0.0, 0.0, 0.0, 1e-6))
    tiers = Tiers(near_bytes_s=1e15, far_bytes_s=1e9, latency_s=0.0)  # a piece of 100 tokens: 100 us; and computing it
    tokens = 20 + 10 + 10 * 100
    even = context_step_s(model, 10, room, tokens, tiers)
    assert even == pytest.approx(1e-6 * tokens, rel=0.15), "the first piece waits, all others hide"
    base = replace(model, decode=(0.0, 0.0, 0.05, 0.0, 1e-6))  # 5 ms before the attention of each layer
    busy = context_step_s(base, 10, room, 20 + 10 + 10 * 10 * 8, replace(tiers, far_bytes_s=2e7))
    read_s = 8 * 100 * 1000 / 2e7
    assert busy < 0.05 + read_s, "reads of a layer go on during the products of the next"
    assert busy > read_s


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 60_000),
    st.floats(1e5, 1e10),
    st.floats(1e6, 1e10),
    st.integers(1, 12),
)
def test_a_step_is_never_faster_than_its_parts_nor_slower_than_their_sum(layers, tokens, far_s, near_s, window):
    room = replace(ROOM, window_blocks=window)
    tiers = Tiers(near_bytes_s=near_s, far_bytes_s=far_s, latency_s=0.0)
    near, far = room.bytes_of(tokens)
    found = context_step_s(MODEL, layers, room, tokens, tiers)
    own_s, read_s = MODEL.decode_s(1, tokens) + near / near_s, far / far_s
    assert max(own_s, read_s) * (1 - 1e-9) <= found <= (own_s + read_s) * (1 + 1e-9)
    assert found <= context_step_s(MODEL, layers, room, tokens, replace(tiers, far_bytes_s=far_s / 2)) * (1 + 1e-9)


# --- a block of batches

MACHINE = Machine(
    flops=1e12, gpu_bytes=1e9, gpu_bytes_s=1e15, dram_bytes=1e11, pcie_bytes_s=1e9, read_bytes_s=1e8, write_bytes_s=1e8
)
SMALL = Opt(layers=10, hidden=10_000)  # 2.4 GB per layer


def test_what_lies_where():
    assert lies(10.0, 4.0, 3.0) == Lies(0.4, 0.3, pytest.approx(0.3))
    assert lies(10.0, -1.0, 30.0) == Lies(0.0, 1.0, 0.0) and lies(10.0, 20.0, 0.0) == Lies(1.0, 0.0, 0.0)
    weights, kv = BlockOfBatches(MACHINE, SMALL, 4, 2, 100, 10).places()
    assert weights == Lies(0.0, 1.0, 0.0) and kv == Lies(0.0, 1.0, 0.0), "24 GB, and the GPU's 1 GB are buffers"
    roomy = replace(MACHINE, gpu_bytes=1e12)
    assert BlockOfBatches(roomy, SMALL, 4, 2, 100, 10).places() == (Lies(1.0, 0.0, 0.0), Lies(1.0, 0.0, 0.0))
    tight = replace(MACHINE, dram_bytes=2.41e10)
    weights, kv = BlockOfBatches(tight, SMALL, 64, 8, 100, 10).places()
    assert weights.dram == 1.0 and kv == Lies(0.0, 0.0, 1.0), "no room left in DRAM"


def test_weights_are_read_once_for_all_batches():
    """Two tokens: a prefill and one step. Reading 2.4 GB per layer over PCIe takes 2.4 s, and hides the rest."""
    one = BlockOfBatches(MACHINE, SMALL, 1, 1, 1, 2)
    assert one.seconds() == pytest.approx(2 * 10 * 2.4, rel=0.01)
    eight = BlockOfBatches(MACHINE, SMALL, 1, 8, 1, 2)
    assert eight.tokens_s == pytest.approx(8 * one.tokens_s, rel=0.01)
    bound = BlockOfBatches(replace(MACHINE, flops=1e9), SMALL, 1, 8, 1, 2)
    assert bound.seconds() == pytest.approx(2 * 10 * 8 * 2.4, rel=0.01), "2.4 GFLOP per token and layer: bound by them"


@pytest.mark.parametrize("name", flexgen.MODELS)
def test_the_number_of_prompts_is_flexgens(name):
    assert {name: size * batches for name, (size, batches) in flexgen.BLOCKS.items()} == {
        "OPT-6.7B": 2, "OPT-30B": 144, "OPT-175B": 256,
    }  # fmt: skip
    parameters = flexgen.MODELS[name].layers * flexgen.MODELS[name].layer_bytes / 2
    assert parameters == pytest.approx(float(name[4:-1]) * 1e9, rel=0.04), "without embeddings"


# --- the case uses the rules of production


def test_a_case_forecasts_and_decides_by_the_rules_of_production():
    found = ContextCase("one", 0.25, 25.0).simulate(0)
    assert found == ContextCase("one", 0.25, 25.0).simulate(0) and found != ContextCase("one", 0.25, 25.0).simulate(1)
    assert 0 < found["forecast_off"] < 0.5 and 0.5 < found["of_limit"] < 1.1
    resident, slow = ContextCase("two", 1.0, 0.5).simulate(0), ContextCase("two", 0.05, 0.5).simulate(0)
    assert resident["classes"] == 3 and slow["classes"] == 0, "tbt objectives of 0.05 to 1 s; a token takes 100 s"
    assert resident["of_fitting"] > 0.9 > slow["of_fitting"]
    assert {case.tokens for case in contexts.cases(None) if case.resident == 0.5} == {
        2 * next(case.tokens for case in contexts.cases(None) if case.resident == 1.0)
    }
