"""A learned choice of the prefill node: the guard holds whatever the predictor says, and a good one is followed."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.placement.costs import prefill_costs
from sched.placement.learned import LearnedPlacement, NodeFactors, envelope
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, Node, demand, node


class Says:
    """A predictor with an answer for every node."""

    def __init__(self, answers: dict[str, float]) -> None:
        self.answers = answers

    def ttft_s(self, node, wait_s, transfer_s, prefill_s):
        return self.answers[node]

    def observed(self, node, wait_s, transfer_s, prefill_s, ttft_s):
        pass


def learned(predictor=None, slack: float = 1.25) -> LearnedPlacement:
    made = LearnedPlacement(Limits(), random.Random(0))
    made.slack = slack
    if predictor is not None:
        made.predictor = predictor
    return made


def choose(policy: LearnedPlacement, nodes: list[Node], num_tokens: int = 1601) -> tuple[int, np.ndarray]:
    view = View(NOW, [candidate for candidate, _ in nodes], FAST, 256)
    costs = prefill_costs(NOW, demand(num_tokens), view, np.array([float(local) for _, local in nodes]), 1.5)
    return policy.choose_prefill(costs, costs.able()), costs.ttft_s


@seed(7)
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 1600), st.floats(allow_nan=True, allow_infinity=True)),
        min_size=1,
        max_size=12,
    ),
    st.floats(1, 8),
)
def test_the_guard_bounds_every_choice(nodes, slack):
    """estimate(chosen) <= slack * least estimate, for any answers: negative, infinite, not a number."""
    known = [node(f"n{i}", wait_s=wait, local_tokens=local) for i, (wait, local, _) in enumerate(nodes)]
    policy = learned(Says({f"n{i}": said for i, (_, _, said) in enumerate(nodes)}), slack)
    chosen, estimates = choose(policy, known)
    assert estimates[chosen] <= slack * estimates.min()
    assert policy.worst <= slack * (1 + 1e-12)


def test_inside_the_envelope_the_predictor_decides():
    nodes = [node("a"), node("b", wait_s=0.3), node("c", wait_s=0.5)]  # 1.6, 1.9 and 2.1 s by the rule
    policy = learned(Says({"a": 3.0, "b": 1.0, "c": 0.1}))
    chosen, _ = choose(policy, nodes)
    assert chosen == 1, "c is outside"
    assert policy.departed == 1 and policy.worst == pytest.approx(1.9 / 1.6, rel=0.01)
    assert choose(learned(Says({"a": math.nan, "b": 9.0, "c": 0.0})), nodes)[0] == 0, "no answer is the rule's answer"


def test_a_predictor_that_errs_more_than_the_rule_is_not_asked():
    nodes = [node("a"), node("b", wait_s=0.3)]
    policy = learned(Says({"a": 8.0, "b": 0.1}))
    assert choose(policy, nodes)[0] == 1
    terms = {"wait_s": 0.3, "transfer_s": 0.0, "prefill_s": 1.6}
    for _ in range(8):
        policy.observed("b", terms, 1.9)
    assert not policy.trusted and choose(policy, nodes)[0] == 0
    policy.predictor.answers["b"] = 1.9
    for _ in range(200):
        policy.observed("b", terms, 1.9)
    assert policy.trusted, "it is watched all the time, and believed again"


def test_a_predictor_may_err_where_the_rule_errs_more():
    policy = learned(Says({"a": 6.0}))
    for _ in range(50):
        policy.observed("a", {"wait_s": 0.0, "transfer_s": 0.0, "prefill_s": 1.0}, 10.0)
    assert policy.error.mean == pytest.approx(0.4) and policy.rule_error.mean == pytest.approx(0.9)
    assert policy.trusted


def test_factors_find_the_slow_node_and_leave_transfers_alone():
    factors = NodeFactors()
    rng = random.Random(3)
    for _ in range(200):
        for name, slowness in (("fast", 1.0), ("slow", 1.6)):
            expected = rng.uniform(0.1, 5.0)
            factors.observed(name, expected / 2, 0.7, expected / 2, slowness * expected * rng.uniform(0.9, 1.1) + 0.7)
    assert factors.factor("fast") == pytest.approx(1.0, rel=0.05)
    assert factors.factor("slow") == pytest.approx(1.6, rel=0.05)
    assert factors.factor("new") == 1.0
    assert factors.ttft_s("slow", 1.0, 0.5, 1.0) == pytest.approx(3.7, rel=0.05)
    factors.observed("odd", 0.0, 0.1, 0.0, 0.2)
    assert factors.factor("odd") == 1.0, "nothing was expected, nothing is learned"


def test_it_learns_to_avoid_a_node_that_is_slower_than_it_says():
    nodes = [node("slow"), node("honest", wait_s=0.2)]
    policy = learned()
    assert choose(policy, nodes)[0] == 0
    for _ in range(40):
        policy.observed("slow", {"wait_s": 0.0, "transfer_s": 0.0, "prefill_s": 1.6}, 2.4)
    assert choose(policy, nodes)[0] == 1


def test_an_envelope_holds_the_best():
    assert envelope([3.0, 1.0, 1.2, 9.0], [4, 5, 6, 7], 1.25) == [5, 6]
    assert envelope([0.0, 0.0, 1.0], [0, 1, 2], 1.0) == [0, 1]
    with pytest.raises(ValueError, match="slack"):
        envelope([1.0], [0], 0.9)
