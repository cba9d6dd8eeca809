"""The compiled shortlist is numpy's: the same cheapest nodes in the same order, the same longest prefix."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from engine.config import Config
from engine.serving import cheapest as compiled
from engine.serving.cheapest import MOST_WIDTH, cheapest
from engine.serving.placement_policy import placement_policy
from sched.admission import Limits
from sched.placements.costs import ranking
from sched.placements.demand import Demand
from sched.placements.measured_links import MeasuredLinks
from sched.placements.mooncake import SMALL, MooncakePlacement
from sched.placements.view import Candidate, View

NOW = 4.0
ROLES = (("prefill",), ("decode",), ("prefill", "decode"))


@pytest.fixture(scope="module", autouse=True)
def prepared():
    compiled.prepare()


def demand(num_tokens: int) -> Demand:
    return Demand(num_tokens=num_tokens, max_tokens=64, pool_tokens=0, block_size=16, token_bytes=1024)


def view_of(count: int, number: int, distinct: int) -> View:
    """Binary fractions of `distinct` values: sums are exact in any order, so equals are equal on both paths."""
    rng = random.Random(number)

    def drawn() -> int:
        return rng.randrange(distinct)

    nodes = [
        Candidate(
            node_id=f"n{i}",
            roles=rng.choice(ROLES),
            wait_s=drawn() / 64,
            waiting=rng.randrange(5),
            prefill=(drawn() / 1024, (1 + drawn()) / 2**16, drawn() / 2**30),
            free_blocks=rng.randrange(64),
            total_blocks=rng.randrange(32, 256),
            step_s=drawn() / 64,
        )
        for i in range(count)
    ]
    return View(1.0, nodes, MeasuredLinks(), 4, expected_arrivals=rng.randrange(20))


def matched_of(view: View, number: int, wanted: Demand) -> np.ndarray:
    rng = random.Random(number)
    most = wanted.usable_tokens // 16
    held = np.array([16.0 * rng.randrange(most + 1) if rng.random() < 0.4 else 0.0 for _ in view.ids])
    return held if held.any() else view.none


@seed(14)
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 300), st.integers(0, 10_000), st.sampled_from((2, 64)), st.integers(1, 2048), st.integers(1, 40))
def test_the_cheapest_are_those_of_numpy(count, number, distinct, tokens, width):
    view, wanted = view_of(count, number, distinct), demand(tokens)
    matched = matched_of(view, number, wanted)
    if count:
        view.charge(NOW, "n0", 0.5, 100)
    rank = ranking(NOW, wanted, view, matched, 1.5)
    expected = [i for i in rank.argsort(kind="stable")[:width].tolist() if rank[i] < np.inf]
    holder = int(matched.argmax()) if matched.any() else None
    assert cheapest(NOW, wanted, view, matched, width) == (expected, holder)


@seed(15)
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 80), st.integers(0, 10_000), st.integers(1, 2048))
def test_a_shortlist_names_whom_numpys_could(count, number, tokens):
    view, wanted = view_of(count, number, 64), demand(tokens)
    matched = matched_of(view, number, wanted)
    ours, numpys = (MooncakePlacement(Limits(4), random.Random(number)) for _ in range(2))
    ours.cheapest = cheapest
    found, expected = (policy.shortlist(NOW, wanted, view, matched) for policy in (ours, numpys))
    if count <= SMALL:
        assert list(found) == list(expected), "nothing is drawn among few"
    assert len(set(found)) == len(found)
    drawn = set()
    for other in range(200):
        policy = MooncakePlacement(Limits(4), random.Random(other))
        drawn |= set(policy.shortlist(NOW, wanted, view, matched))
    assert set(found) <= drawn


def test_a_copy_of_a_view_is_read_at_its_own_address():
    view, wanted = view_of(40, 1, 64), demand(100)
    first = cheapest(NOW, wanted, view, view.none, 3)
    assert first is not None
    other = view.copy()
    other.open_at[first[0]] = np.inf
    assert cheapest(NOW, wanted, view, view.none, 3) == first
    again = cheapest(NOW, wanted, other, other.none, 3)
    assert again is not None and not set(again[0]) & set(first[0])


def test_what_the_code_cannot_do_is_left_to_numpy(monkeypatch):
    view, wanted = view_of(40, 1, 64), demand(100)
    assert cheapest(NOW, wanted, view, view.none, MOST_WIDTH + 1) is None
    monkeypatch.setattr(compiled, "_library", None)
    assert cheapest(NOW, wanted, view, view.none, 3) is None
    policy = MooncakePlacement(Limits(4), random.Random(0))
    policy.cheapest = cheapest
    expected = MooncakePlacement(Limits(4), random.Random(0)).shortlist(NOW, wanted, view, view.none)
    assert policy.shortlist(NOW, wanted, view, view.none) == expected != ()


def test_a_node_that_serves_uses_it():
    policy = placement_policy(Config(), random.Random(0))
    assert isinstance(policy, MooncakePlacement) and policy.cheapest is cheapest
