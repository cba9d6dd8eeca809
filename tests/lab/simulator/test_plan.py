"""Plans: formulas against known values, what more nodes do, and why a load is infeasible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.formulas.plan import Decode, Infeasible, Load, Objective, Prefill, Split, front, plan
from lab.simulator.models.step_models import PRESETS

MODEL = PRESETS["llama3-70b-8xa800"]


def load(rate: float, prompt: float = 8000, answer: float = 200, found: float = 0, requests: int = 200) -> Load:
    rng = np.random.default_rng(0)
    prompts = np.round(rng.lognormal(math.log(prompt), 0.6, requests)) + 2
    answers = np.round(rng.lognormal(math.log(answer), 0.6, requests)) + 1
    return Load(rate, prompts, answers, np.minimum(prompts - 1, found * prompts))


def test_one_node_without_variation_waits_as_m_d_1_does():
    same = Load(0.5, np.full(50, 8000.0), np.full(50, 10.0), np.zeros(50))
    pool = Prefill(MODEL, same)
    service, busy = float(pool.service[0]), pool.offered
    seconds = service * 1.5
    mean_wait = busy * service / (2 * (1 - busy))
    expected = 1 - busy * math.exp(-0.5 * service * busy / mean_wait)
    assert pool.kept(1, seconds) == pytest.approx(expected)
    assert pool.kept(1, 0.99 * service) == 0


@settings(max_examples=20, deadline=None)
@given(rate=st.floats(0.5, 40), found=st.floats(0, 0.9), tbt_s=st.floats(0.04, 0.3), ttft_s=st.floats(6, 60))
def test_a_plan_is_the_fewest_nodes_that_keep_the_objectives(rate, found, tbt_s, ttft_s):
    wanted, objective = load(rate, found=found), Objective(ttft_s, tbt_s)
    best = plan(MODEL, wanted, objective, 1.0, 1.0).best
    prefill, decode = Prefill(MODEL, wanted), Decode(MODEL, wanted)
    assert prefill.kept(best.prefill, ttft_s) >= 0.9 > prefill.kept(best.prefill - 1, ttft_s)
    assert decode.kept(best.decode, tbt_s, 0.9) >= 0.9
    assert best.decode == 1 or decode.kept(best.decode - 1, tbt_s, 0.9) < 0.9
    assert best.ttft_s <= ttft_s and best.tbt_s <= tbt_s


def test_found_prefixes_save_prefill_nodes_alone():
    cold, warm = (plan(MODEL, load(20, found=f), Objective(20, 0.1), 1, 1).best for f in (0.0, 0.6))
    assert warm.prefill < cold.prefill and warm.decode == cold.decode


def test_memory_bounds_the_batch_where_steps_would_allow_more():
    small = MODEL.__class__(**{name: getattr(MODEL, name) for name in MODEL.__slots__} | {"kv_tokens": 200_000})
    many, few = (plan(model, load(20), Objective(20, 0.3), 1, 1).best.decode for model in (small, MODEL))
    assert many > few


IMPOSSIBLE = [
    (Objective(0.05, 0.1), "service time"),
    (Objective(20, 0.02), "step time"),
]


@pytest.mark.parametrize(("objective", "words"), IMPOSSIBLE)
def test_what_no_number_of_nodes_can_do(objective, words):
    with pytest.raises(Infeasible, match=words):
        plan(MODEL, load(1), objective, 1.0, 1.0)


def test_prompts_that_fit_nowhere():
    with pytest.raises(Infeasible, match="memory"):
        plan(PRESETS["embedded-cpu"], load(0.01, prompt=200_000), Objective(1e6, 10), 1.0, 1.0)


def test_cost_per_million_tokens():
    same = Load(2.0, np.full(50, 900.0), np.full(50, 100.0), np.zeros(50))
    found = plan(MODEL, same, Objective(5, 0.1), 16.0, 8.0)
    hourly = 16.0 * found.best.prefill + 8.0 * found.best.decode
    assert found.per_million_output == pytest.approx(hourly / (3600 * 2 * 100) * 1e6)
    assert found.per_million_tokens == pytest.approx(found.per_million_output / 10)


def test_the_front_drops_what_is_beaten():
    good, slow, dear = Split(1, 1, 1.0, 0.1, 2), Split(1, 2, 1.0, 0.2, 3), Split(2, 2, 0.5, 0.05, 4)
    assert front([dear, slow, good]) == [good, dear]


def test_a_load_without_requests():
    with pytest.raises(ValueError, match="--rate"):
        load(0.0)
