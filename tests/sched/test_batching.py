"""Batching policies: how many prefill tokens a step may have."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.config import Config
from sched.batching import MIN_CHUNK_TOKENS, BoundedSteps, DynamicChunks, StepLoad, Tuning, batching_policies
from sched.cost import DecodeModel, PrefillModel
from sched.queueing import queue_orders
from sched.step_cost import StepModel


class Linear:
    """1 ms per token of any kind."""

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        return decodes / 1000

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return tokens / 1000

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        return round(seconds * 1000) - decodes

    def largest_prefill(self, seconds: float, context: int) -> int:
        return round(seconds * 1000)


TUNING = Tuning(chunk_tokens=256, tbt_s=0.1, predictor=Linear())


@pytest.mark.parametrize(
    ("name", "decodes", "tokens"),
    [
        ("prefill-first", 8, 1016),
        ("decode-first", 8, 1016),
        ("mixed", 8, 256),
        ("mixed", 0, 256),
        ("dynamic", 8, 92),
        ("dynamic", 60, 180),  # three times as long again as the decodes take
        ("dynamic", 20, 80),
        ("dynamic", 0, 1016),
    ],
)
def test_prefill_tokens(name, decodes, tokens):
    assert batching_policies[name](TUNING).prefill_tokens(StepLoad(1016, decodes, 100 * decodes, 0)) == tokens


def test_the_flags_offer_what_there_is():
    choices = {spec.name: spec.metadata["choices"] for spec in fields(Config)}
    assert choices["batching_policy"] == tuple(batching_policies)
    assert choices["queue_order"] == tuple(queue_orders)


def test_only_prefill_first_lets_decodes_wait():
    assert [name for name, make in batching_policies.items() if make(TUNING).decodes_wait] == ["prefill-first"]


POSITIVE = st.floats(1e-9, 1e-3)


def test_dynamic_never_starves_prefill():
    class Pessimist(Linear):
        def largest_chunk(self, *_: object) -> int:
            return -1

    policy = DynamicChunks(0.1, Pessimist())
    assert policy.prefill_tokens(StepLoad(1016, 8, 800, 0)) == MIN_CHUNK_TOKENS


@pytest.mark.parametrize("name", list(batching_policies))
def test_a_step_with_prefill_is_bounded_in_time_under_every_policy(name):
    policy = batching_policies[name](TUNING)
    for max_s, decodes, most in ((0.2, 0, 200), (0.05, 0, 50), (0.05, 8, 42), (0.05, 60, 32), (0.001, 0, 32)):
        load = StepLoad(1016, decodes, 100 * decodes, 0)
        bounded = BoundedSteps(policy, max_s, Linear())
        assert bounded.prefill_tokens(load) == min(policy.prefill_tokens(load), most)
        assert bounded.decodes_wait == policy.decodes_wait


def test_a_long_prompt_is_computed_in_steps_that_keep_the_time():
    """Chunks shrink as the context grows: at 10 GFLOP/s, the slowest CPU that was measured, a step of 1,024 tokens
    behind 7,000 took many seconds."""
    model = StepModel(PrefillModel((2e-3, 1e-3, 3e-7)), DecodeModel())
    policy = BoundedSteps(batching_policies["decode-first"](TUNING), 0.5, model)
    done, chunks = 0, []
    while done < 8000:
        chunk = min(policy.prefill_tokens(StepLoad(1024, 0, 0, done)), 8000 - done)
        assert chunk == MIN_CHUNK_TOKENS or model.prefill.estimate(chunk, done) <= 0.5
        done += chunk
        chunks.append(chunk)
    assert chunks[0] > 3 * chunks[-2] > 0 and model.prefill.estimate(1024, 7000) > 3


@given(
    a=st.tuples(POSITIVE, POSITIVE, st.floats(1e-12, 1e-6)),
    seconds=st.floats(1e-4, 2),
    context=st.integers(0, 100_000),
)
def test_the_largest_prefill_is_the_largest(a, seconds, context):
    model = StepModel(PrefillModel(a), DecodeModel())
    tokens = model.largest_prefill(seconds, context)
    if tokens < 0:
        assert a[0] > seconds
    else:
        assert a[0] + model.prefill.estimate(tokens, context, chunks=0) <= seconds * (1 + 1e-6)
        assert model.prefill.estimate(tokens + 1, context) > seconds * (1 - 1e-6)


@given(
    a=st.tuples(POSITIVE, POSITIVE, st.floats(1e-12, 1e-6)),
    d=st.tuples(POSITIVE, POSITIVE, st.floats(1e-12, 1e-6)),
    seconds=st.floats(1e-4, 2),
    load=st.tuples(st.integers(1, 64), st.integers(1, 100_000), st.integers(0, 100_000)),
)
def test_the_largest_chunk_is_the_largest(a, d, seconds, load):
    model = StepModel(PrefillModel(a), DecodeModel(d))
    decodes, decode_context, prefill_context = load
    chunk = model.largest_chunk(seconds, decodes, decode_context, prefill_context)
    slack = 1e-6 * seconds
    if chunk < 0:
        assert model.estimate(decodes, decode_context, 0, prefill_context) > seconds - slack
    elif chunk < 1 << 30:
        assert model.estimate(decodes, decode_context, chunk, prefill_context) <= seconds + slack
        assert model.estimate(decodes, decode_context, chunk + 1, prefill_context) > seconds - slack


def test_mixed_steps_teach_how_the_two_add_up():
    """A machine whose chunks cost 25 ms each, 10 us per token of context and 1.4 times the prefill model's slope."""
    rng = np.random.default_rng(1)
    prefill, decode = PrefillModel((1e-3, 1e-3, 1e-8)), DecodeModel((1e-2, 1e-3, 1e-7))
    model = StepModel(prefill, decode)

    def truth(tokens: int, context: int) -> float:
        _, a1, a2 = prefill.coefficients
        return (
            decode.estimate(4, 2000)
            + 0.025
            + 1e-5 * context
            + 1.4 * (a1 * tokens + a2 * tokens * (tokens + 2 * context))
        )

    for _ in range(100):
        tokens, context = int(rng.integers(32, 256)), int(rng.integers(0, 4000))
        model.observe(4, 2000, tokens, context, truth(tokens, context) * rng.uniform(0.95, 1.05))
    model.observe(4, 2000, 64, 500, 60.0)  # somebody stopped the machine
    for tokens, context in ((32, 0), (200, 3000)):
        assert model.estimate(4, 2000, tokens, context) == pytest.approx(truth(tokens, context), rel=0.1)
    chunk = model.largest_chunk(0.15, 4, 2000, 1000)
    assert truth(chunk, 1000) == pytest.approx(0.15, rel=0.1)
