"""The compiled choice among a few nodes is that of the reference, to the last bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from engine.config.config import Config
from engine.front.compiled import choose
from engine.front.placement_policy import placement_policy
from sched.admission import Limits
from sched.placement.central import CentralGreedy
from sched.placement.choice import Placement
from sched.placement.demand import Demand
from sched.placement.few import MAX_FEW_NODES, find_few, place_few
from sched.placement.measured_links import MeasuredLinks
from sched.placement.mooncake import MooncakePlacement
from sched.placement.view import Candidate, View

NOW = 4.0
ROLES = (("prefill",), ("decode",), ("prefill", "decode"), ("store",))


@pytest.fixture(scope="module", autouse=True)
def prepared():
    choose.prepare()


def view_of(count: int, rng: random.Random, few_values: bool) -> View:
    """`few_values`: many nodes are alike, so that there are equals."""

    def drawn(most: float) -> float:
        return most * rng.randrange(2) if few_values else rng.uniform(0.0, most)

    links = MeasuredLinks()
    for i in range(count):
        if rng.random() < 0.5:
            links.reported(f"n{i}", rng.uniform(1e6, 1e10), {f"n{rng.randrange(count)}": rng.uniform(1e6, 1e10)})
    nodes = [
        Candidate(
            node_id=f"n{i}",
            roles=rng.choice(ROLES),
            wait_s=drawn(6.0),
            waiting=rng.randrange(5),
            running=rng.randrange(3),
            queued_tokens=rng.choice((0, rng.randrange(4000))),
            prefill=(drawn(0.1), drawn(1e-3), drawn(1e-7)),
            free_blocks=rng.randrange(200),
            total_blocks=rng.randrange(32, 256),
            step_s=drawn(0.1),
            step_soon_s=drawn(0.1),
        )
        for i in range(count)
    ]
    return View(2.0, nodes, links, 4)


def demand_of(rng: random.Random) -> Demand:
    return Demand(
        num_tokens=rng.randrange(1, 3000),
        max_tokens=rng.randrange(1, 600),
        other_blocks=rng.choice([0, rng.randrange(40)]),
        pool_tokens=rng.choice((0, 15, 16, rng.randrange(4000))),
        block_size=rng.choice((1, 16, 24)),
        handover_token_bytes=rng.uniform(1.0, 1e6),
        fetch_token_bytes=rng.uniform(1.0, 1e6),
        fetch_from=rng.choice(("pool", "arena")),
        ssd_s=rng.choice((0.0, rng.random())),
        dram_tokens=rng.choice((0, rng.randrange(4000))),
    )


@seed(14)
@settings(max_examples=800, deadline=None)
@given(
    st.integers(0, MAX_FEW_NODES),
    st.integers(0, 1 << 30),
    st.booleans(),
    st.sampled_from((1.0, 1.5, float("inf"))),
    st.booleans(),
    st.sampled_from((None, 0.5, 4.0)),
)
def test_the_choice_is_that_of_the_reference(count, number, few_values, threshold, fetches, objective):
    """Also with equals, with full nodes, and when nothing can take the request; both draw alike."""
    rng = random.Random(number)
    view, demand, limits = view_of(count, rng, few_values), demand_of(rng), Limits(4, objective)
    most = demand.usable_tokens // demand.block_size
    held = [float(demand.block_size * rng.randrange(most + 1)) if rng.random() < 0.4 else 0.0 for _ in view.ids]
    matched = np.array(held)
    draws = random.Random(number), random.Random(number)
    found = [
        place_few(NOW, demand, view, matched, threshold, fetches, limits, drawing.choice, find)
        for drawing, find in zip(draws, (choose.find, None), strict=True)
    ]
    assert found[0] == found[1]
    if found[0] is not None:
        assert found[0].considered == found[1].considered
    assert draws[0].random() == draws[1].random()


def test_equals_are_drawn_in_both_stages():
    nodes = [
        Candidate(node_id=f"n{i}", roles=(role,), prefill=(0.0, 1e-3, 0.0), free_blocks=500, total_blocks=500,
                  step_s=0.01)
        for i, role in enumerate(("prefill", "prefill", "decode", "decode", "decode"))
    ]  # fmt: skip
    view = View(2.0, nodes, MeasuredLinks(), 4)
    demand = Demand(
        num_tokens=100, max_tokens=9, pool_tokens=0, block_size=16, handover_token_bytes=1.0, fetch_token_bytes=1.0
    )
    sets = []

    def last(able: list[int]) -> int:
        sets.append(able)
        return able[-1]

    placed = place_few(NOW, demand, view, view.none, 1.5, True, Limits(), last, choose.find)
    assert isinstance(placed, Placement) and (placed.prefill, placed.decode) == ("n1", "n4")
    assert sets == [[0, 1], [2, 3, 4]]
    assert placed.estimates["handover_s"] > 0.0 and placed.estimates["step_s"] == 0.01


def test_without_a_compiler_plain_python_finds_the_same(monkeypatch):
    found = 0
    for number in range(20):
        rng = random.Random(number)
        view, demand = view_of(8, rng, False), demand_of(rng)
        asked = (NOW, demand, view, view.table.tobytes(), view.none, 1.5, view.fetch_each(), rng.choice)
        compiled = choose.find(*asked)
        found += compiled is not None
        with monkeypatch.context() as patch:
            patch.setattr(choose, "_library", None)
            assert choose.find(*asked) == compiled == find_few(*asked)
    assert found > 3


def test_a_node_that_serves_uses_it_for_its_default_policy():
    policy = placement_policy(Config(), random.Random(0))
    assert isinstance(policy, MooncakePlacement) and policy.find is choose.find
    central = placement_policy(Config(placement="mooncake-central-greedy"), random.Random(0))
    assert isinstance(central, CentralGreedy) and central.find is None, "the comparison is the reference itself"
