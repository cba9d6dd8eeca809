"""A choice over few nodes in plain floats is the choice over their columns: the same nodes, estimates and draws."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.placement import central
from sched.placement.central import CentralGreedy
from sched.placement.choice import Placement
from sched.placement.costs import DecodeCosts, PrefillCosts
from sched.placement.demand import Demand
from sched.placement.few import FewCosts
from sched.placement.links import Lines, Paths, columns
from sched.placement.measured_links import MeasuredLinks
from sched.placement.mooncake import MooncakePlacement
from sched.placement.rivals import LocalCache
from sched.placement.two_stages import TwoStages
from sched.placement.view import Candidate, View

NOW = 16.0
POLICIES = (MooncakePlacement, CentralGreedy, LocalCache)
ROLES = (("prefill",), ("decode",), ("prefill", "decode"), ("store",))


class DrawnLinks:
    """Paths drawn from a seed, in 1/1024 s and 2^-40 s per byte."""

    places: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, number: int) -> None:
        self.number = number

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return columns(self.fetch_each(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handover_each(source, nodes))

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return array("d", [one for node in nodes for one in self._line(node)])

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return array("d", [one for node in nodes for one in self._line(source + node)])

    def _line(self, path: str) -> tuple[float, float]:
        rng = random.Random(f"{self.number} {path}")
        return rng.randrange(3) / 1024, rng.randrange(1, 64) / 2**30


def candidate(i: int, few: bool, draw: Any) -> tuple[Candidate, int]:
    """Binary fractions, so that sums are exact in any order and equals are equal on both paths; `few`: of few values,
    so that there are equals."""

    def most(value: int) -> int:
        return draw(st.integers(0, 1 if few else value))

    known = Candidate(
        node_id=f"n{i}",
        roles=draw(st.sampled_from(ROLES)),
        wait_s=most(4096) / 64,
        waiting=draw(st.sampled_from((0, 1, 2, 3, 4))),
        running=most(32),
        queued_tokens=draw(st.sampled_from((0, 0, 16, 2048))),
        prefill=(most(64) / 1024, (1 + most(64)) / 2**16, most(64) / 2**30),
        free_blocks=draw(st.integers(0, 300)),
        total_blocks=draw(st.integers(50, 300)),
        step_s=most(64) / 1024,
        step_soon_s=most(64) / 1024,
    )
    return known, draw(st.sampled_from((0, 0, 16, 512, 1008)))


@st.composite
def cases(draw: Any) -> tuple[list[tuple[Candidate, int]], Demand, Limits, float, int]:
    few = draw(st.booleans())
    nodes = [candidate(i, few, draw) for i in range(draw(st.integers(0, 12)))]
    wanted = Demand(
        num_tokens=draw(st.integers(1, 2048)),
        max_tokens=draw(st.integers(1, 400)),
        pool_tokens=draw(st.sampled_from((0, 16, 700, 1024, 4096))),
        block_size=16,
        handover_token_bytes=draw(st.sampled_from((1024, 258.5))),
        fetch_token_bytes=draw(st.sampled_from((1024, 258.5))),
        fetch_from=draw(st.sampled_from(("pool", "arena"))),
        ssd_s=draw(st.sampled_from((0.0, 1 / 64, 2.0))),
        ssd_tokens=draw(st.sampled_from((0, 16, 800))),
        dram_tokens=draw(st.sampled_from((0, 16, 500, 2048))),
    )
    slo = draw(st.sampled_from((None, 0.25, 8.0)))
    limits = Limits(4, slo, draw(st.sampled_from((None, 1 / 64, 1.0))))
    return nodes, wanted, limits, draw(st.sampled_from((1.0, 1.5, 2.0, float("inf")))), draw(st.integers(0, 99))


@seed(14)
@settings(max_examples=400, deadline=None)
@given(cases(), st.sampled_from(POLICIES))
def test_floats_choose_as_columns_do(case, kind):
    nodes, wanted, limits, threshold, number = case
    links = DrawnLinks(number)
    view = View(NOW, [known for known, _ in nodes], links, limits.max_waiting)
    matched = np.array([float(min(own, wanted.usable_tokens // 16 * 16)) for _, own in nodes])
    if not matched.any():
        matched = view.none
    floats, in_columns = (kind(limits, random.Random(number), threshold) for _ in range(2))
    for _ in range(3):
        found, expected = (
            floats.place(NOW, wanted, view, matched),
            TwoStages.place(in_columns, NOW, wanted, view, matched),
        )
        assert found == expected
        assert found.considered == expected.considered
    assert floats.rng.random() == in_columns.rng.random(), "they drew alike"


def view_of(count: int, links: Any = None) -> View:
    nodes = [
        Candidate(node_id=f"n{i}", roles=("prefill", "decode"), wait_s=float(i), prefill=(0.0, 1e-3, 0.0),
                  free_blocks=1000, total_blocks=1000, step_s=0.02)
        for i in range(count)
    ]  # fmt: skip
    return View(NOW, nodes, links or DrawnLinks(0), 256)


WANTED = Demand(
    num_tokens=1000,
    max_tokens=100,
    pool_tokens=512,
    block_size=16,
    handover_token_bytes=1024,
    fetch_token_bytes=1024,
)


def test_few_nodes_are_chosen_among_in_floats_and_many_in_columns():
    policy = MooncakePlacement(Limits(), random.Random(0))
    for count, stages in ((3, [FewCosts]), (central.MAX_FEW_NODES + 1, [PrefillCosts, DecodeCosts])):
        view = view_of(count)
        placed = policy.place(NOW, WANTED, view, view.none)
        assert isinstance(placed, Placement) and [type(stage) for stage in placed.stages] == stages


@pytest.mark.parametrize("overridden", ["choose_prefill", "choose_decode"])
def test_a_policy_that_chooses_otherwise_is_asked(overridden):
    last = {overridden: lambda self, costs, able: able[-1]}
    policy = type("Last", (MooncakePlacement,), last)(Limits(), random.Random(0))
    placed = policy.place(NOW, WANTED, view := view_of(4), view.none)
    assert isinstance(placed, Placement)
    assert (placed.prefill if overridden == "choose_prefill" else placed.decode) == "n3"
    heir = type("Heir", (type(policy),), {})(Limits(), random.Random(0))
    assert heir.place(NOW, WANTED, view, view.none) == placed


def test_a_decision_is_explained_as_it_was_made():
    """Work that came later and what links have learnt since do not show."""
    links = MeasuredLinks()
    view = view_of(4, links)
    placed = MooncakePlacement(Limits(), random.Random(0)).place(NOW, WANTED, view, view.none)
    assert isinstance(placed, Placement)
    before = placed.considered
    view.charge(NOW, placed.prefill, 9.0, 1000)
    for _ in range(3):
        links.fetched(placed.prefill, 1 << 20, 5.0)
        links.handed_over(placed.prefill, "n3", 1 << 20, 5.0)
    assert placed.considered == before
    chosen = next(row for row in before if row["node"] == placed.prefill)
    assert {name: chosen[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")} == pytest.approx(
        {name: placed.estimates[name] for name in ("wait_s", "transfer_s", "prefill_s", "ttft_s")}
    )


@seed(15)
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(1e6, 1e10), st.floats(1e-4, 5.0)), max_size=20))
def test_measured_paths_are_the_same_as_lists_and_as_columns(measured):
    links, nodes = MeasuredLinks(), list("abcde")
    for node, rate, seconds in measured:
        links.reported(node, rate, {"c": rate})
        links.fetched(node, 1 << 20, seconds)
        links.handed_over("a", node, 1 << 20, seconds)
    for lines, (latency_s, per_byte_s) in (
        (links.fetch_each(nodes), links.fetch(nodes)),
        (links.handover_each("a", nodes), links.handover("a", nodes)),
    ):
        assert lines.tolist() == np.column_stack((latency_s, per_byte_s)).ravel().tolist()
