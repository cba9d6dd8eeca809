"""The rivals do what their names say, every policy keeps what all must keep, and shortlists are as wide as gossip is
old."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.placement.arrivals import ArrivalRate
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import prefill_costs
from sched.placement.links import Lines, Paths, columns, distance
from sched.placement.mooncake import DRAWN_NODES, SHORTLIST_SIZE, SMALL_CLUSTER, MooncakePlacement, width_of
from sched.placement.table import placements
from sched.placement.two_stages import TwoStages
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, MIXED, NOW, FlatLinks, Node, decide, demand, node

BOTH = ("prefill", "decode")


def policy(name: str, number: int = 0, limits: Limits | None = None):
    return placements[name](limits or Limits(), random.Random(number))


def view_of(nodes: list[Node], expected_arrivals: float = 0.0) -> tuple[View, np.ndarray]:
    view = View(NOW, [candidate for candidate, _ in nodes], FAST, 256, expected_arrivals)
    return view, np.array([float(local) for _, local in nodes])


def test_round_robin_takes_turns():
    chosen = policy("round-robin")
    nodes = [node(name) for name in "abc"]
    assert Counter(decide(chosen, demand(), nodes).prefill for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_least_load_ignores_the_cache():
    nodes = [node("a", wait_s=1.0, local_tokens=1600, running=1), node("b", wait_s=0.9, running=2)]
    placed = decide(policy("least-load"), demand(), nodes)
    assert (placed.prefill, placed.decode) == ("b", "a")


def test_local_cache_weighs_its_own_prefix_and_never_fetches():
    wanted = demand(pool_tokens=1600)
    nodes = [node("a", wait_s=0.5, local_tokens=800), node("b")]
    placed = decide(policy("local-cache"), wanted, nodes)
    assert (placed.prefill, placed.prefix_source, placed.prefix_tokens) == ("a", "local", 800)
    placed = decide(policy("local-cache"), wanted, [node("a", wait_s=90.0, local_tokens=800), node("b")])
    assert (placed.prefill, placed.prefix_source) == ("b", "none"), "the pool would have it"


def test_power_of_two_takes_the_better_of_the_two_it_drew():
    nodes = [node(f"n{i}", wait_s=float(i)) for i in range(8)]
    chosen = policy("power-of-two")
    seen = Counter(decide(chosen, demand(), nodes).prefill for _ in range(400))
    assert "n7" not in seen, "the worst of all is never the better of two"
    assert seen["n0"] > seen["n6"] > 0
    view, matched = view_of(nodes)
    assert 2 <= len(chosen.shortlist(NOW, demand(), view, matched)) <= 4


def test_dynamo_cost_adds_blocks_to_prefill_and_counts_those_in_use():
    nodes = [
        node("queued", queued_tokens=2000, local_tokens=1600, free_blocks=900),
        node("cached", queued_tokens=500, local_tokens=1600, free_blocks=100),
        node("idle", queued_tokens=0, free_blocks=500),
    ]
    placed = decide(policy("dynamo-cost"), demand(), nodes)
    assert (placed.prefill, placed.decode) == ("cached", "queued")


def test_llm_d_adds_prefix_queue_and_memory():
    half = {"total_blocks": 1000, "free_blocks": 500}
    nodes = [node("cached", local_tokens=1600, waiting=4, **half), node("empty", waiting=0, **half)]
    assert decide(policy("llm-d"), demand(), nodes).prefill == "cached", "2 x 1.0 for the prefix, 1 for the queue"
    nodes = [node("cached", local_tokens=400, waiting=4, **half), node("empty", waiting=0, **half)]
    assert decide(policy("llm-d"), demand(), nodes).prefill == "empty", "a quarter of the prompt weighs 0.5"
    full = node("full", total_blocks=1000, free_blocks=200)
    assert decide(policy("llm-d"), demand(), [full, node("roomy", **half)]).decode == "roomy"


def test_preble_exploits_a_prefix_of_most_of_the_prompt_until_its_node_is_overloaded():
    idle = node("idle")
    assert decide(policy("preble"), demand(), [node("holder", wait_s=0.2, local_tokens=1200), idle]).prefill == "holder"
    assert decide(policy("preble"), demand(), [node("holder", wait_s=90.0, local_tokens=1200), idle]).prefill == "idle"
    some = node("some", wait_s=5.0, local_tokens=400)
    assert decide(policy("preble"), demand(), [some, idle]).prefill == "idle", "less than half: explore"
    two = [node("busy", wait_s=0.2, local_tokens=1200), node("free", local_tokens=1200), idle]
    assert decide(policy("preble"), demand(), two).prefill == "free"


def test_banaserve_looks_at_load_alone_and_fetches_what_the_pool_has():
    nodes = [node("cached", wait_s=0.4, local_tokens=1600), node("idle", wait_s=0.3)]
    placed = decide(policy("banaserve"), demand(pool_tokens=1600), nodes)
    assert (placed.prefill, placed.prefix_source, placed.prefix_tokens) == ("idle", "pool", 1600)
    half = {"total_blocks": 1000, "free_blocks": 500}
    nodes = [node("full", running=1, total_blocks=1000, free_blocks=200), node("calm", running=2, **half),
             node("busy", running=8, **half)]  # fmt: skip
    assert decide(policy("banaserve"), demand(), nodes).decode == "calm", "0.5 + 2/8 against 0.8 + 1/8 and 0.5 + 1"


class TreeLinks(FlatLinks):
    """1 GB/s inside a host, 0.1 GB/s between hosts."""

    places: ClassVar[dict[str, tuple[str, ...]]] = {
        name: ("pod", f"host{i // 2}") for i, name in enumerate(("p0", "d0", "p1", "d1", "p2", "d2"))
    }

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        near = [distance(self.places[source], self.places[node]) == 0 for node in nodes]
        return array("d", [one for is_near in near for one in (0.0, 1e-9 if is_near else 1e-8)])

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handover_each(source, nodes))


def decode_of(name: str | TwoStages, **known: dict[str, float]) -> str:
    """The decode node for a prompt whose prefill is best on p1."""
    chooser = policy(name) if isinstance(name, str) else name
    made = [node(f"p{i}", ("prefill",), wait_s=float(i != 1))[0] for i in range(3)]
    made += [node(f"d{i}", ("decode",), **known.get(f"d{i}", {}))[0] for i in range(3)]
    view = View(NOW, made, TreeLinks(), 256)
    placed = chooser.place(NOW, demand(1600), view, np.zeros(6))
    assert isinstance(placed, Placement) and placed.prefill == "p1"
    return placed.decode


def test_netkv_weighs_distance_and_load_of_links_against_the_decode_step():
    kv_s = demand(1600).handover_bytes * 1e-9  # inside the host
    assert decode_of("netkv") == "d1"
    assert decode_of("netkv", d1={"step_s": 0.02 + 8 * kv_s}) == "d1"
    assert decode_of("netkv", d1={"step_s": 0.02 + 10 * kv_s}, d0={"running": 9}, d2={"nic_in": 0.5}) == "d0"
    assert decode_of("netkv", d1={"nic_in": 0.8}) == "d1", "still twice as fast as from another host"
    assert decode_of("netkv", d1={"nic_in": 0.94}, d2={"nic_in": 0.5}) == "d0"
    assert decode_of("netkv", d1={"free_blocks": 0}, d2={"nic_in": 0.5}) == "d0", "no room"
    assert decode_of("netkv", **{f"d{i}": {"free_blocks": i} for i in range(3)}) == "d2", "all full: the most room"


def test_netkv_does_not_count_the_usual_load_of_a_node_twice():
    """Measured hand-overs to a node that is always as busy have this load in them already; only more counts."""
    netkv, full = policy("netkv"), {"free_blocks": 0}
    far_s, near_s = (demand(1600).handover_bytes * per_byte_s for per_byte_s in (1e-8, 1e-9))
    slow = {"step_s": 0.02 + (far_s - 2 * near_s)}  # worth it while the hand-over to d1 costs at most twice as much
    assert decode_of(netkv, d1={"nic_in": 0.8} | slow, d2=full) == "d0", "five times as much as over an idle path"
    for _ in range(300):
        decode_of(netkv, d1={"nic_in": 0.8}, d2=full)
    assert decode_of(netkv, d1={"nic_in": 0.8} | slow, d2=full) == "d1", "the measured time is that of this load"
    assert decode_of(netkv, d1={"nic_in": 0.95} | slow, d2=full) == "d0", "it is busier than usual"
    assert decode_of(netkv, d1={"nic_in": 0.0} | slow, d2=full) == "d1"


def test_the_shortlist_has_a_decode_node_near_each_prefill_node_where_places_are_told():
    made = [node(f"p{i}", ("prefill",), wait_s=float(i))[0] for i in range(3)]
    made += [node(f"d{i}", ("decode",), step_s=0.01 + i, free_blocks=1000 if i else 0)[0] for i in range(3)]
    few = [*made, *(node(f"x{i}", ("decode",), step_s=0.001)[0] for i in range(6))]
    links = TreeLinks()
    view, blind = View(NOW, few, links, 256), View(NOW, few, FAST, 256)
    asked = {view.ids[i] for i in policy("mooncake").shortlist(NOW, demand(), view, np.zeros(12))}
    assert asked >= {"p0", "p1", "p2", "d1", "d2"}, "d0 has no room, so another node of its pod stands for it"
    assert not {blind.ids[i] for i in policy("mooncake").shortlist(NOW, demand(), blind, np.zeros(12))} & {"d1", "d2"}
    assert view.near_decode(0, 1, random.Random(1)) in (4, 5), "no room on its host: any node of the pod"
    assert view.near_decode(6, 1, random.Random(1)) is None, "it tells no place"


def test_gorgo_adds_weighted_tokens_that_wait_to_tokens_to_compute():
    nodes = [node("cached", queued_tokens=1000, local_tokens=1200), node("idle")]
    chosen = policy("gorgo")
    assert decide(chosen, demand(), nodes).prefill == "cached", "401 + 1000 against 1601"
    chosen.weight = 2.0
    assert decide(chosen, demand(), nodes).prefill == "idle", "401 + 2000 against 1601"


def tuned(ttft_of_weight, windows: int, number: int = 3):
    """A GORGO whose measured TTFT depends on its weight alone."""
    chosen = policy("gorgo", number)
    for _ in range(windows * chosen.window):
        chosen.observed("a", {}, ttft_of_weight(chosen.weight))
    return chosen


@pytest.mark.parametrize("best", [0.1, 1.0, 20.0])
def test_gorgo_finds_the_weight_with_the_least_measured_time(best):
    chosen = tuned(lambda weight: 1.0 + abs(math.log(weight / best)), 400)
    assert abs(math.log(chosen.best_weight / best)) < 0.7


def test_gorgo_looks_at_the_95th_percentile_of_a_window():
    chosen = policy("gorgo")
    slow = round(0.05 * chosen.window)
    for i in range(chosen.window):
        chosen.observed("a", {}, 9.0 if i < slow - 1 else 1.0)
    assert chosen.best_s == 1.0, "fewer than one in twenty are slow"
    chosen = policy("gorgo")
    for i in range(chosen.window):
        chosen.observed("a", {}, 9.0 if i <= slow else 1.0)
    assert chosen.best_s == 9.0


@seed(11)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.001, 1000.0), max_size=400), st.integers(0, 99))
def test_gorgo_keeps_its_weight_in_range_whatever_it_measures(times, number):
    chosen = policy("gorgo", number)
    for ttft_s in times:
        chosen.observed("a", {}, ttft_s)
        low, high = chosen.range_of_weight
        assert low <= chosen.weight <= high and chosen.step > 0


CENTRAL = ["mooncake-central-greedy", "local-cache", "dynamo-cost", "llm-d", "preble", "gorgo", "banaserve",
           "windserve", "ecoserve", "taichi", "netkv"]  # fmt: skip


@pytest.mark.parametrize("name", CENTRAL)
def test_a_policy_that_stands_for_a_central_one_asks_everybody(name):
    view, matched = view_of([node(f"n{i}") for i in range(40)])
    assert sorted(policy(name).shortlist(NOW, demand(), view, matched)) == list(range(40))


@pytest.mark.parametrize("name", ["random", "round-robin", "least-load"])
def test_a_policy_without_probes_asks_nobody(name):
    view, matched = view_of([node(f"n{i}") for i in range(40)])
    assert list(policy(name).shortlist(NOW, demand(), view, matched)) == []


def test_a_small_cluster_is_asked_where_it_is_cheapest():
    view, matched = view_of([node(f"n{i}", wait_s=float(10 - i), step_s=0.01 * (1 + i)) for i in range(10)])
    asked = policy("mooncake").shortlist(NOW, demand(), view, matched)
    assert set(asked[:SHORTLIST_SIZE]) == {9, 8, 7, 6}
    assert {0, 1, 2} <= set(asked), "and the best decode nodes"


def test_a_shortlist_is_as_wide_as_the_state_is_old():
    nodes = [node(f"n{i}", BOTH, wait_s=0.1 * i) for i in range(SMALL_CLUSTER * 8)]
    for arrivals in (0.0, 40.0):
        view, matched = view_of(nodes, arrivals)
        chosen = MooncakePlacement(Limits(), random.Random(1))
        costs = prefill_costs(NOW, demand(), view, matched, 1.5)
        drawn = [i for _ in range(200) for i in chosen._prefills(costs.ttft_s, view, width_of(view))[:DRAWN_NODES]]
        assert max(drawn) < max(DRAWN_NODES, 1 + arrivals)
    assert len(set(drawn)) > 30, "the herd is spread over the K cheapest"


def test_the_best_cache_holder_is_always_asked():
    nodes = [node(f"n{i}", wait_s=0.001 * i) for i in range(100)]
    nodes[77] = node("holder", wait_s=9.0, local_tokens=1600)
    view, matched = view_of(nodes)
    assert all(77 in policy("mooncake", n).shortlist(NOW, demand(), view, matched) for n in range(20))


def test_charged_work_counts_at_once_and_fills_the_queue():
    view, matched = view_of([node("a"), node("b", wait_s=1.0)])
    chosen = policy("mooncake-central-greedy")
    assert chosen.place(NOW, demand(), view, matched).prefill == "a"
    view.charge(NOW, "a", 2.0, 1600)
    assert chosen.place(NOW, demand(), view, matched).prefill == "b"
    for _ in range(256):
        view.charge(NOW, "b", 0.0)
    assert chosen.place(NOW, demand(), view, matched).prefill == "a"


def test_a_node_that_sent_the_prompt_away_is_avoided_unless_it_is_the_last():
    view, matched = view_of([node("a"), node("b", wait_s=50.0)])
    chosen = policy("mooncake")
    view.close("a")
    assert chosen.place(NOW, demand(), view, matched).prefill == "b"
    view.close("b")
    assert chosen.place(NOW, demand(), view, matched).prefill == "b"


@seed(6)
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(placements)),
    st.lists(
        st.tuples(
            st.sampled_from([("prefill",), ("decode",), MIXED, ("store",)]),
            st.floats(0, 100),
            st.integers(0, 300),
            st.integers(0, 4000),
            st.integers(0, 400),
        ),
        max_size=24,
    ),
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.integers(0, 1000),
)
def test_what_every_policy_keeps(name, nodes, num_tokens, pool_tokens, number):
    """A placement names nodes that have the role, room in the queue and memory for the prompt; a refusal means that
    there is none; shortlists name nodes of the view once."""
    known = [
        node(f"n{i}", roles, wait_s=wait, waiting=waiting, local_tokens=local, free_blocks=min(free, 100 + free // 2),
             total_blocks=100 + free // 2)
        for i, (roles, wait, waiting, local, free) in enumerate(nodes)
    ]  # fmt: skip
    wanted = demand(num_tokens, pool_tokens)
    chosen = policy(name, number)
    view, matched = view_of(known, 3.0)
    asked = chosen.shortlist(NOW, wanted, view, matched)
    assert len(set(asked)) == len(asked) and set(asked) <= set(range(len(known)))
    placed = decide(chosen, wanted, known)
    able = {
        role: {
            c.node_id for c, _ in known if role in c.roles and c.waiting < 256 and c.total_blocks * 16 > num_tokens
        }
        for role in BOTH
    }  # fmt: skip
    if isinstance(placed, Rejected):
        assert not able["prefill"] or not able["decode"]
        return
    assert isinstance(placed, Placement)
    assert placed.prefill in able["prefill"] and placed.decode in able["decode"]
    assert 0 <= placed.prefix_tokens < num_tokens
    assert placed.considered


def test_the_arrival_rate_follows_and_forgets():
    rate = ArrivalRate(memory_s=5.0)
    assert rate.per_s(0.0) == 0.0
    for i in range(400):
        rate.count(i * 0.1)
    assert rate.per_s(40.0) == pytest.approx(10.0, rel=0.15)
    assert rate.per_s(80.0) < 0.01


def test_a_part_of_a_view_is_a_view_of_those_nodes():
    nodes = [node(f"n{i}", wait_s=float(i), prefill=(0.0, 1e-3 * (i + 1), 0.0), step_s=0.01 * i) for i in range(6)]
    view, _ = view_of(nodes)
    assert (view.index, view.decode_order, view.fetch(1000)) and view.handover("n1")
    part, fresh = view.only([4, 1]), view_of([nodes[4], nodes[1]])[0]
    for name, value in vars(fresh).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(part, name), value), name
    assert (part.ids, part.index, part.decode_order) == (fresh.ids, fresh.index, fresh.decode_order)
    part.charge(NOW, "n4", 5.0)
    assert view.work_until[4] == NOW + 4.0
