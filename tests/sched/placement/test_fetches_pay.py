"""Placement never chooses a fetch that is slower than computing: from DRAM, from SSD or from another node's arena."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.placement.central import MAX_FEW_NODES
from sched.placement.choice import Placement
from sched.placement.demand import Demand
from sched.placement.links import Lines, Paths, columns
from sched.placement.pooled import PooledPrefix, fetched
from sched.placement.table import placements
from sched.placement.view import Candidate, View

NOW, BLOCK = 50.0, 16
ROLES = (("prefill",), ("decode",), ("prefill", "decode"))
SECONDS = st.floats(0.0, 20.0)


@st.composite
def nodes(draw: Any) -> list[Candidate]:
    return [
        Candidate(
            node_id=f"n{i}",
            roles=ROLES[i] if i < 2 else draw(st.sampled_from(ROLES)),
            wait_s=draw(st.just(0.0) | SECONDS),
            waiting=draw(st.integers(0, 3)),
            prefill=(draw(st.floats(0, 0.1)), draw(st.floats(1e-7, 1e-2)), draw(st.just(0.0) | st.floats(0, 1e-6))),
            free_blocks=draw(st.integers(0, 900)),
            total_blocks=900,
            step_s=draw(st.floats(0, 0.1)),
        )
        for i in range(draw(st.integers(2, 7)))
    ]


@st.composite
def prefixes(draw: Any) -> tuple[PooledPrefix, str]:
    """What the pool has of a prompt of 4,000 tokens, or what is in the arena of another node. `ssd_s` is a share of the
    time in which the quickest node computes the part on SSD."""
    blocks = draw(st.integers(0, 249))
    warm = draw(st.integers(0, blocks))
    if draw(st.booleans()):
        return PooledPrefix(tokens=BLOCK * blocks, dram_tokens=BLOCK * blocks, ssd_tokens=0, ssd_s=0.0), "arena"
    return PooledPrefix(
        tokens=BLOCK * blocks,
        dram_tokens=BLOCK * warm,
        ssd_tokens=BLOCK * (blocks - warm),
        ssd_s=draw(st.floats(0.01, 1.2)) if warm < blocks else 0.0,
    ), "pool"


class Rates:
    """Node i fetches at rates[i % len(rates)] bytes/s; a hand-over takes no time."""

    places: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, rates: Sequence[float], latency_s: float) -> None:
        self.lines = [(latency_s, 1 / rate) for rate in rates]

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return columns(self.fetch_each(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handover_each(source, nodes))

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return array("d", [value for i in range(len(nodes)) for value in self.lines[i % len(self.lines)]])

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return array("d", (0.0, 0.0)) * len(nodes)


@seed(21)
@settings(max_examples=60)
@given(
    nodes(),
    prefixes(),
    st.lists(st.integers(0, 249), min_size=7, max_size=7),
    st.lists(st.floats(0.01, 3.0), min_size=7, max_size=7),
    st.floats(1e-6, 0.1),
    st.sampled_from((1.0, 1.5, float("inf"))),
    st.booleans(),
)
@pytest.mark.parametrize("policy", placements)
def test_no_policy_fetches_what_is_computed_sooner(policy, known, prefix, held, shares, latency_s, threshold, many):
    """shares: of the time of a node's tokens, that of fetching them."""
    slopes = [one.prefill[1] for one in known]
    rates = [1000.0 / (share * slope) for share, slope in zip(shares, slopes, strict=False)]
    if many:  # columns instead of plain floats
        known = known + [
            Candidate(node_id=f"store-{i}", roles=("store",), prefill=(0.0, 1.0, 0.0)) for i in range(MAX_FEW_NODES)
        ]
    view = View(NOW, known, Rates(rates, latency_s), 4)
    found, source = prefix
    quickest = min(slope for one, slope in zip(known, slopes, strict=False) if "prefill" in one.roles)
    found = replace(found, ssd_s=found.ssd_s * quickest * found.ssd_tokens).worth_fetching(view)
    demand = Demand(
        num_tokens=4000, max_tokens=100, pool_tokens=found.tokens, block_size=BLOCK, handover_token_bytes=1000.0,
        fetch_token_bytes=1000.0, fetch_from=source, ssd_s=found.ssd_s, ssd_tokens=found.ssd_tokens,
        dram_tokens=found.dram_tokens,
    )  # fmt: skip
    matched = np.array([float(BLOCK * held[i % 7]) if i % 3 else 0.0 for i in range(len(known))])
    placed = placements[policy](Limits(4), random.Random(0), threshold).place(NOW, demand, view, matched)
    if isinstance(placed, Placement):
        check(placed, demand, view, matched)


def check(placed: Placement, demand: Demand, view: View, matched: np.ndarray) -> None:
    i, reach = view.index[placed.prefill], placed.prefix_tokens
    own = int(matched[i])
    if placed.prefix_source not in ("pool", "arena"):
        assert placed.estimates["transfer_s"] == 0.0 and reach == own
        return
    moved_s, disk_s = prices(view, i, demand, own, reach)
    assert own < reach <= demand.pooled_tokens
    assert placed.estimates["transfer_s"] == pytest.approx(moved_s + disk_s)
    assert moved_s + disk_s <= computed_s(view, i, own, reach), "it is sooner without any fetch"
    if disk_s:
        near = max(own, demand.near_tokens)
        latency_s = float(view.fetch(demand.fetch_token_bytes)[0][i])
        behind_s = prices(view, i, demand, near, reach)[0] - latency_s
        assert behind_s + disk_s <= computed_s(view, i, near, reach), "it is sooner without the part on SSD"


def prices(view: View, i: int, demand: Demand, begin: int, end: int) -> tuple[float, float]:
    """(seconds on the way, seconds on the disk) of these tokens."""
    latency_s, per_token_s = view.fetch(demand.fetch_token_bytes)
    disk_s = demand.ssd_s if end > demand.near_tokens else 0.0
    return float(latency_s[i] + per_token_s[i] * (end - begin)), disk_s


def computed_s(view: View, i: int, begin: int, end: int) -> float:
    """Seconds in which node i computes these tokens, and the error of the sums."""
    seconds = float(view.a1[i] * (end - begin) + view.a2[i] * (end**2 - begin**2))
    return seconds + 1e-9 + 1e-9 * float(view.prefill[:, i] @ (1.0, 4000.0, 4000.0**2))


def test_a_slow_disk_keeps_no_node_from_the_part_in_dram():
    """100 tokens a second are computed, 200 moved: 960 tokens in 9.6 s or 4.8 s."""
    node = Candidate(node_id="a", roles=("prefill", "decode"), prefill=(0.0, 1e-2, 0.0), free_blocks=900,
                     total_blocks=900, step_s=0.01)  # fmt: skip
    for ssd_s, reach in ((4.7, 1600), (4.9, 640)):
        view = View(NOW, [node], Rates([2e5], 1e-4), 4)
        demand = Demand(
            num_tokens=4000, max_tokens=100, pool_tokens=1600, block_size=BLOCK, handover_token_bytes=1000.0,
            fetch_token_bytes=1000.0, ssd_s=ssd_s, ssd_tokens=960, dram_tokens=640,
        )  # fmt: skip
        for policy in ("mooncake", "mooncake-central-greedy", "round-robin"):
            placed = placements[policy](Limits(4), random.Random(0)).place(NOW, demand, view, view.none)
            assert isinstance(placed, Placement) and placed.prefix_tokens == reach
            assert placed.considered[0]["prefix_tokens"] == reach
        assert fetched(view, 0, demand, 0)[0] == reach
