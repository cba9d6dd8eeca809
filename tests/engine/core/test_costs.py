"""What the running step adds to the load of a node: rows that pass only some of the layers count as such."""

from __future__ import annotations

import pytest

from engine.core.costs import StepCosts
from engine.sampling.params import SamplingParams
from engine.step.cold import Cold
from engine.step.part import Stage
from engine.step.request import Request
from engine.step.step import ScheduledRow, Step

LAYERS = 10


def request(name: str, tokens: int, computed: int = 0, cold: bool = False) -> Request:
    found = Request(name, [1] * tokens, tokens, SamplingParams(max_tokens=4), 0.0, b"r" * 16)
    found.num_computed = computed
    found.cold = Cold(8, 2, 16, LAYERS) if cold else None
    return found


def row(one: Request, count: int, layers: range | None = None) -> ScheduledRow:
    return ScheduledRow(one, one.num_computed, count, False, layers=layers)


def test_some_layers_of_a_prompt_beyond_memory_are_some_of_its_work():
    costs = StepCosts()
    cold, short = row(request("long", 4000, 1000, cold=True), 100, range(2, 4)), row(request("short", 50), 50)
    left = costs.left_features(cold.request, 100)
    whole_s = costs.prefill.regression.estimate(left)
    costs.started(Step([cold]), 5.0)
    slice_s = 0.2 * costs.prefill.estimate(100, 1000)
    assert costs.queued_s(1, left, 5.0) == pytest.approx(whole_s)
    assert costs.queued_s(1, left, 1e9) == pytest.approx(whole_s - slice_s)
    assert Step([short, cold]).other_prompts() == pytest.approx([20 / 70, 50 / 70])


def part(tokens: int, begin: int, end: int) -> Request:
    found = request("part", tokens)
    found.part = Stage(begin, end, LAYERS, 1000)
    return found


def test_a_chunk_that_passes_its_layers_in_two_steps_counts_once():
    costs, one = StepCosts(), part(4000, 2, 7)
    first = row(one, 400, range(2, 7))
    first.stay(4)
    costs.observe(Step([first]), 0.2)
    assert not costs.prefill.regression.observations
    second = row(one, 400, range(4, 7))
    second.spent_s = 0.2
    costs.observe(Step([second]), 0.3)
    assert costs.prefill.regression.observed() == [((1.0, 200.0, 80000.0), 0.5)]
    costs.observe(Step([row(request("decode", 11, 10), 1), second]), 0.3)
    assert costs.prefill.regression.observations == 1


def test_layers_that_a_chunk_has_passed_are_no_load():
    costs, one = StepCosts(), part(1000, 2, 7)
    chunks, tokens, pairs = costs.left_features(one, 500)
    assert (tokens, pairs) == (500, 0.5 * 1000 * 1000)
    one.part.passed(400, 6)
    left = costs.left_features(one, 500)
    assert left == pytest.approx((chunks, tokens - 160, pairs - 0.4 * 400 * 400))
    one.part.passed(0, 0)
    one.num_computed = 400
    assert costs.left_features(one, 500)[1:] == pytest.approx((300, 0.5 * (600 * 600 + 2 * 600 * 400)))


def test_a_step_takes_as_long_as_the_layers_of_requests_beyond_memory_last_took():
    costs = StepCosts()
    cold, decode = row(request("long", 4001, 4000, cold=True), 1, range(3)), row(request("d", 11, 10), 1)
    costs.started(Step([decode]), 0.0)
    alone_s = costs.queued_s(0, (0.0, 0.0, 0.0), 0.0)
    assert alone_s == pytest.approx(costs.decode.estimate(1, 11))
    costs.started(Step([decode, cold]), 0.0)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), 0.0) == pytest.approx(alone_s), "its context is none of a usual decode"
    assert cold.request.cold is not None
    cold.request.cold.computed(1, range(2), 0.5, None)
    costs.started(Step([decode, cold]), 0.0)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), 0.0) == pytest.approx(alone_s + 0.75)
