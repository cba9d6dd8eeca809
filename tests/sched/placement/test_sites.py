"""The site of a request: queue, transfer or recompute, and distance; a token costs 1 ms to prefill."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sched.cost import TransferModel
from sched.placement.sites.choice import SiteCost, by_site, far_saves_s, nearest, site_cost
from sched.placement.sites.distances import MEASURE_S, WINDOW_S, Distances
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, SLOW, FlatLinks, Node, demand, node


def cost(
    nodes: list[Node], distance_s: float = 0.0, pool_tokens: int = 0, links: FlatLinks = FAST, most: int = 100
) -> SiteCost:
    wanted = demand(pool_tokens=pool_tokens)
    view = View(NOW, [candidate for candidate, _ in nodes], links, most)
    matched = np.array([float(min(local, wanted.usable_tokens)) for _, local in nodes])
    return site_cost(NOW, wanted, view, matched, nodes[0][0].node_id[0], distance_s)


def chosen(*offers: SiteCost) -> str:
    found = nearest(offers, own="a")
    assert found is not None
    return found.site


def test_the_own_site_wins_while_the_distance_costs_more_than_its_queue():
    here = cost([node("a1", wait_s=0.05)])
    assert chosen(here, cost([node("b1")], distance_s=0.06)) == "a"
    assert chosen(here, cost([node("b1")], distance_s=0.04)) == "b"


def test_a_prefix_at_another_site_counts_as_the_time_to_compute_it():
    here = cost([node("a1")])
    assert chosen(here, cost([node("b1", local_tokens=160)], distance_s=0.1)) == "b"
    assert chosen(here, cost([node("b1", local_tokens=160)], distance_s=0.2)) == "a"


def test_what_the_own_pool_has_counts_only_if_its_transfer_is_shorter_than_computing():
    far = cost([node("b1", local_tokens=1600)], distance_s=0.1)
    assert chosen(cost([node("a1")], pool_tokens=1600, links=FAST), far) == "a"
    assert chosen(cost([node("a1")], pool_tokens=1600, links=SLOW), far) == "b"


def test_a_site_without_a_role_or_without_room_takes_no_request():
    assert cost([node("b1", roles=("prefill",))]).ttft_s == math.inf
    assert cost([node("b1", roles=("decode",))]).ttft_s == math.inf
    assert cost([node("b1", waiting=100)], most=100).ttft_s == math.inf
    assert cost([node("b1", roles=("prefill",)), node("b2", roles=("decode",))]).ttft_s < math.inf
    assert nearest([cost([node("b1", roles=("decode",))])], own="a") is None


def test_a_site_of_unknown_distance_takes_no_request():
    assert chosen(cost([node("a1", wait_s=1e6)]), cost([node("b1")], distance_s=math.inf)) == "a"


costs = st.floats(0.0, 100.0) | st.just(math.inf)
offers = st.lists(
    st.builds(SiteCost, st.sampled_from("abcdef"), costs, costs), min_size=1, max_size=6, unique_by=lambda one: one.site
)


@given(offers)
def test_no_other_site_costs_less_and_the_own_one_wins_ties(found):
    best = nearest(found, own="a")
    able = [one for one in found if one.total_s < math.inf]
    if best is None:
        assert not able
        return
    assert best.total_s == min(one.total_s for one in able)
    own = [one for one in able if one.site == "a"]
    assert best.site == "a" or not own or own[0].total_s > best.total_s


@given(
    compute_s=st.floats(0.0, 10.0),
    latency_s=st.floats(0.001, 0.2),
    rate=st.floats(1e3, 1e9),
    nbytes=st.integers(1, 10**9),
    wait_s=st.floats(0.0, 10.0),
)
def test_a_fetch_that_takes_longer_than_computing_never_pays(compute_s, latency_s, rate, nbytes, wait_s):
    saved_s = far_saves_s(compute_s, TransferModel(latency_s, rate), nbytes, wait_s)
    fetch_s = wait_s + latency_s + nbytes / rate
    if abs(fetch_s - compute_s) > 1e-6:
        assert (saved_s > 0) == (fetch_s < compute_s)


def test_nodes_by_site():
    found = by_site(["x", "", "x", "y"])
    assert {site: rows.tolist() for site, rows in found.items()} == {"x": [0, 2], "": [1], "y": [3]}


# --- distances


def test_the_own_site_is_at_no_distance_and_an_unmeasured_one_at_infinity():
    known = Distances("a")
    known.observe(0.0, "a", 0.3)
    assert known.of(0.0, "a") == 0.0 and not known.stale(0.0, "a")
    assert known.of(0.0, "b") == math.inf and known.stale(0.0, "b")


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.001, 1.0)), min_size=1, max_size=40))
def test_a_distance_is_the_least_round_trip_of_the_window_or_the_last_one(trips):
    known, now, seen = Distances("a"), 0.0, []
    for pause, seconds in trips:
        now += pause
        known.observe(now, "b", seconds)
        seen.append((now, seconds))
        recent = [found for at, found in seen if now - at <= WINDOW_S]
        assert known.of(now, "b") == min(recent)
        assert not known.stale(now, "b")
    assert known.stale(now + MEASURE_S + 1e-6, "b")
    assert known.of(now + 10 * WINDOW_S, "b") == seen[-1][1]


def test_a_site_that_has_gone_is_measured_again_when_it_returns():
    known = Distances("a")
    known.observe(0.0, "b", 0.3)
    known.keep({"a": None})
    assert known.of(1.0, "b") == math.inf
