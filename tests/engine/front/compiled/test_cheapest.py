"""The compiled shortlist is that of the reference, given the same random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from engine.config.config import Config
from engine.front.compiled import cheapest as compiled
from engine.front.compiled.cheapest import MAX_WIDTH, shortlist
from engine.front.compiled.choose import find
from engine.front.placement_policy import placement_policy
from sched.admission import Limits
from sched.placement.demand import Demand
from sched.placement.measured_links import MeasuredLinks
from sched.placement.mooncake import SMALL_CLUSTER, Compiled, MooncakePlacement
from sched.placement.view import Candidate, View

NOW = 4.0
ROLES = (("prefill",), ("decode",), ("prefill", "decode"))


@pytest.fixture(scope="module", autouse=True)
def prepared():
    compiled.prepare()


def demand(num_tokens: int) -> Demand:
    return Demand(
        num_tokens=num_tokens,
        max_tokens=64,
        other_blocks=num_tokens % 3,
        pool_tokens=0,
        block_size=16,
        handover_token_bytes=1024,
        fetch_token_bytes=1024,
    )


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
            running=rng.randrange(3),
            queued_tokens=rng.choice((0, rng.randrange(4000))),
            prefill=(drawn() / 1024, (1 + drawn()) / 2**16, drawn() / 2**30),
            free_blocks=rng.randrange(64),
            total_blocks=rng.randrange(32, 256),
            step_s=drawn() / 64,
        )
        for i in range(count)
    ]
    return View(
        1.0, nodes, MeasuredLinks(), 4, expected_arrivals=rng.choice((rng.randrange(20), rng.randrange(MAX_WIDTH), 1e6))
    )


def matched_of(view: View, number: int, wanted: Demand) -> np.ndarray:
    rng = random.Random(number)
    most = wanted.usable_tokens // 16
    held = np.array([16.0 * rng.randrange(most + 1) if rng.random() < 0.4 else 0.0 for _ in view.ids])
    return held if held.any() else view.none


class Mix(random.Random):
    """The generator of cheapest.c: splitmix64."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self._state = int(drawn * 2**53)

    def random(self) -> float:
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        z = self._state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return ((z ^ z >> 31) >> 11) / 2**53


def both(view: View, wanted: Demand, matched: np.ndarray, drawn: float) -> tuple[list[int], list[int]]:
    """The compiled shortlist, and the one of the reference with the same random numbers."""
    same = Compiled(lambda *asked: shortlist(*asked[:-1], drawn), find)
    ours = MooncakePlacement(Limits(4), random.Random(0), compiled=same)
    reference = MooncakePlacement(Limits(4), Mix(drawn))
    return list(ours.shortlist(NOW, wanted, view, matched)), list(reference.shortlist(NOW, wanted, view, matched))


@seed(14)
@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(0, 10_000),
    st.sampled_from((2, 64)),
    st.integers(1, 2048),
    st.floats(0, 1, exclude_max=True),
    st.booleans(),
)
def test_the_shortlist_is_that_of_the_reference(count, number, distinct, tokens, drawn, charged):
    """Also with ties, draws among all nodes, nodes that hold nothing, are full, cannot take it, and after charges."""
    view, wanted = view_of(count, number, distinct), demand(tokens)
    matched = matched_of(view, number, wanted)
    if charged and count:
        both(view, wanted, matched, drawn)  # what a view works out once
        view.charge(NOW, "n0", 0.5, 100)
    ours, expected = both(view, wanted, matched, drawn)
    assert ours == expected


def test_every_draw_is_made():
    """Views where each of the ways to a decode node is taken; a constant of the two that differs shows."""
    rng, ways = random.Random(3), set()
    for count in (1, 4, SMALL_CLUSTER, SMALL_CLUSTER + 1, 60, 400):
        for roomy in (0, 2, 300):
            view = view_of(count, count + roomy, 64)
            view.free_blocks[:] = np.where(np.arange(count) < roomy, 10_000.0, 0.0)
            view.expected_arrivals = float(rng.choice((0, 5, 30, 1000)))
            for _ in range(20):
                ours, expected = both(view, demand(64), view.none, rng.random())
                assert ours == expected
                ways.add((count, roomy, len(ours)))
    assert len(ways) > 20


def test_a_copy_of_a_view_is_read_at_its_own_address():
    view, wanted = view_of(40, 1, 64), demand(100)
    first, _ = both(view, wanted, view.none, 0.5)
    other = view.copy()
    other.open_at[:] = np.inf
    assert both(view, wanted, view.none, 0.5)[0] == first != []
    assert both(other, wanted, other.none, 0.5) == ([], [])
    kept = view.copy()
    both(kept, wanted, kept.none, 0.5)
    kept.keep([0, 1], view_of(2, 7, 64), [0, 1])
    ours, expected = both(kept, wanted, kept.none, 0.5)
    assert ours == expected


def test_what_the_code_cannot_do_is_left_to_numpy(monkeypatch):
    view, wanted = view_of(MAX_WIDTH + 40, 1, 64), demand(100)
    view.expected_arrivals = float(MAX_WIDTH)
    assert shortlist(NOW, wanted, view, view.none, 0.5) is None
    view.expected_arrivals = MAX_WIDTH - 1.0
    assert shortlist(NOW, wanted, view, view.none, 0.5) is not None
    monkeypatch.setattr(compiled, "_library", None)
    assert shortlist(NOW, wanted, view, view.none, 0.5) is None
    policy = MooncakePlacement(Limits(4), random.Random(0), compiled=Compiled(shortlist, find))
    assert policy.shortlist(NOW, wanted, view, view.none) != ()


def test_a_column_of_matches_need_not_be_contiguous():
    view, wanted = view_of(40, 1, 64), demand(1000)
    held = matched_of(view, 5, wanted)
    spread = np.repeat(held, 2)[::2]
    assert not spread.flags.c_contiguous
    assert both(view, wanted, spread, 0.5)[0] == both(view, wanted, held, 0.5)[1]


def test_a_column_is_read_at_its_own_address_however_many_there_are():
    view, wanted = view_of(40, 1, 64), demand(1000)
    for number in range(3 * compiled.KEPT_ADDRESSES):
        matched = matched_of(view, number, wanted)
        for _ in range(2):
            ours, expected = both(view, wanted, matched, 0.5)
            assert ours == expected
    assert len(compiled._addresses) <= compiled.KEPT_ADDRESSES


def test_a_node_that_serves_uses_it():
    policy = placement_policy(Config(), random.Random(0))
    assert isinstance(policy, MooncakePlacement) and policy.compiled == Compiled(shortlist, find)
