"""The view: the newest record of every member, aged by the own clock, and known everywhere soon."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.exchange import SLOWEST_S
from sched.gossip.state import HEARTBEAT_S, ClusterView, NodeRecord, node_key
from sched.membership.member import presets
from tests.sched.virtual import VirtualNet

LOCAL = presets["local"]


def record_of(node_id: str, incarnation: int = 0, version: int = 1, **load: Any) -> NodeRecord:
    return NodeRecord(node=node_key(node_id), incarnation=incarnation, version=version, **load)


def view_of(*node_ids: str, own: str = "me") -> ClusterView:
    view = ClusterView(own)
    for node_id in node_ids:
        view.admit(node_id)
    return view


def told(view: ClusterView, now: float, node_id: str) -> NodeRecord:
    """What the view passes on about a node."""
    return NodeRecord.unpack(view.packed(now, np.flatnonzero(view.keys == node_key(node_id))))


# --- the view


@seed(3)
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4))
def test_merging_is_commutative_and_idempotent_and_the_newest_wins(versions):
    heard = [record_of(n, i, v, waiting=10 * i + v) for n, i, v in versions]
    outcomes = []
    for order in permutations(heard):
        view = view_of("a", "b")
        for record in [*order, *order]:
            view.merge(0.0, record)
        outcomes.append(view.records(0.0))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for node_id in {n for n, _, _ in versions}:
        newest = max(version[1:] for version in versions if version[0] == node_id)
        assert outcomes[0][node_id].order == newest
        assert outcomes[0][node_id].waiting == 10 * newest[0] + newest[1]


def test_a_record_ages_with_the_holder_s_clock_and_is_passed_on_aged():
    a, b = view_of("x", own="a"), view_of("x", own="b")
    assert a.merge(1000.0, record_of("x", work_s=10.0, age_s=0.5))
    assert a.get("x", 1003.0).work_s == pytest.approx(7.0)
    passed = told(a, 1004.0, "x")
    assert b.merge(-5.0, passed), "b's clock has nothing to do with a's"
    late = b.get("x", -4.0)
    assert late.work_s == pytest.approx(5.0) and late.age_s == pytest.approx(5.5)
    assert b.get("x", 100.0).work_s == 0.0


def test_only_members_have_records():
    view = view_of("a")
    assert not view.merge(0.0, record_of("stranger"))
    assert not view.merge(0.0, record_of("me", 9, 9))
    assert view.merge(0.0, record_of("a"))
    view.forget("a")
    assert view.get("a", 0.0) is None and not view.merge(0.0, record_of("a", 0, 2))
    view.admit("a")
    assert view.merge(0.0, record_of("a", 0, 1)), "a node that came back starts again"


def test_own_increments_count_until_the_next_record():
    view = view_of("a")
    view.charge("a", 1.0)
    view.merge(0.0, record_of("a", work_s=1.0, waiting=2))
    view.charge("a", 3.0)
    assert view.get("a", 0.0).work_s == 4.0 and view.get("a", 0.0).waiting == 3
    assert view.get("a", 2.0).work_s == 2.0, "charged work drains too, one after the other"
    passed = told(view, 0.0, "a")
    assert passed.work_s == 1.0, "what is passed on is what the owner said"
    assert [(r.work_s, r.waiting, r.age_s) for r in view.records(0.5).values()] == [(0.5, 2, 0.5)], "and observers read"
    view.merge(2.0, record_of("a", 0, 2, work_s=2.5, waiting=3))
    assert view.get("a", 2.0).work_s == 2.5 and view.get("a", 2.0).waiting == 3


def test_an_own_record_counts_what_was_sent_to_itself():
    """Short requests came and went between two heartbeats: none of them waits here."""
    view = ClusterView("me")
    view.publish(0.0, 0, NodeRecord())
    for tenth in range(1, 9):
        view.charge("me", 0.0)
        assert view.get("me", tenth / 10).waiting == 1
        view.publish(tenth / 10, 0, NodeRecord())
        assert view.get("me", tenth / 10).waiting == 0 and view.get("me", tenth / 10).version == 1


def test_a_new_version_only_for_news_or_as_heartbeat():
    view = ClusterView("me")
    load = NodeRecord(work_s=5.0, blocks_total=100, blocks_used=10)

    def version_after(now: float, record: NodeRecord, incarnation: int = 0) -> tuple[int, int]:
        view.publish(now, incarnation, record)
        return divmod(int(view.orders[0]), 2**32)

    assert version_after(0.0, load) == (0, 1)
    assert version_after(0.5, replace(load, work_s=4.5)) == (0, 1), "draining is no news"
    assert version_after(0.6, replace(load, work_s=5.0)) == (0, 2)
    assert version_after(0.7, replace(load, work_s=4.9, blocks_used=14)) == (0, 2)
    assert version_after(0.7, replace(load, work_s=4.9, blocks_used=30)) == (0, 3)
    assert version_after(0.8, replace(load, work_s=4.8, blocks_used=30, running=1)) == (0, 4)
    assert version_after(0.8 + HEARTBEAT_S, replace(load, work_s=3.8, blocks_used=30, running=1)) == (0, 5)
    assert version_after(1.9, replace(load, work_s=3.7, blocks_used=30, running=1), incarnation=1) == (1, 6)


@seed(6)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30), st.integers(0, 2**32))
def test_rows_follow_the_members(steps, number):
    """Nodes come and go in any order; a node that stays keeps its record, a node that comes back starts again."""
    view, rng, model = ClusterView("me"), random.Random(number), {}
    for name, comes in ((f"n{i}", comes) for i, comes in steps):
        if comes:
            view.admit(name)
            model.setdefault(name, None)
            if rng.random() < 0.7:
                version = 1 + (model[name] or 0)
                assert view.merge(0.0, record_of(name, 0, version))
                model[name] = version
        else:
            view.forget(name)
            model.pop(name, None)
        assert {n: r.version for n, r in view.records(0.0).items()} == {n: v for n, v in model.items() if v}
        names, records = view.table(0.0)
        assert sorted(names) == sorted([*model, "me"]) and view.keys.tolist() == sorted(map(node_key, names))
        assert [int(v) for n, v in zip(names, records["version"], strict=True) if n != "me"] == [
            model[n] or 0 for n in names if n != "me"
        ]


@pytest.mark.parametrize("size, loss", [(3, 0.0), (8, 0.2), (32, 0.2)])
def test_load_is_known_everywhere_within_a_few_periods(size, loss):
    net = VirtualNet(seed=size, loss=loss)
    nodes = net.cluster(size)
    assert net.run_until(lambda: net.converged() and all(known(net, node.name) for node in nodes), 30.0) is not None
    node = nodes[1]
    node.load = NodeRecord(blocks_total=100, blocks_used=77, running=5, work_s=1e5)
    took = net.run_until(lambda: all(seen_blocks(net, other, node.name) == 77 for other in nodes), 10.0)
    assert took is not None
    print(f"{size} nodes, {loss:.0%} loss: {took / LOCAL.state_period_s:.1f} periods")
    assert took < 20 * LOCAL.state_s(size)
    for other in nodes:  # nobody's clock agrees, yet all agree on the remaining work
        record = other.core.view.get(node.name, net.now + other.clock_offset)
        assert record.work_s + record.age_s == pytest.approx(1e5, abs=0.5)


@pytest.mark.parametrize("size", [3, 12, pytest.param(32, marks=pytest.mark.heavy)])
def test_an_idle_cluster_sends_little_and_still_tells_a_change_at_once(size):
    net = VirtualNet(seed=size)
    nodes = net.cluster(size)
    net.run(10.0)
    before, idle_s = [node.packets_sent for node in nodes], 10.0
    net.run(idle_s)
    idle = max(node.packets_sent - count for node, count in zip(nodes, before, strict=True)) / idle_s
    ages = []
    for node in nodes:
        ages += [record.age_s for record in node.core.view.records(net.now + node.clock_offset).values()]
    print(f"{size} nodes: {idle:.1f} packets per node and second, oldest record {max(ages):.2f} s")
    assert idle < 30, "68 at the full rate with 12 nodes"
    assert max(ages) < HEARTBEAT_S + 10 * SLOWEST_S, "heartbeats arrive"

    took = []
    for used in range(10, 90, 16):
        node = net.rng.choice(nodes)
        node.load = NodeRecord(blocks_total=100, blocks_used=used, running=used)
        took.append(net.run_until(lambda: all(seen_blocks(net, o, node.name) == used for o in nodes), 10.0))  # noqa: B023
        net.run(1.5)
    assert None not in took and sorted(took)[len(took) // 2] < 5 * LOCAL.state_s(size) and max(took) < HEARTBEAT_S


def test_an_idle_node_reads_its_load_no_more_often_than_a_busy_one():
    """Alone, four times per second."""
    for size, most in ((1, 5.0), (3, 1.1 / LOCAL.state_s(3))):
        net, seconds = VirtualNet(seed=size), 10.0
        read = []
        net.load_of = lambda node: read.append(node) or node.load  # noqa: B023
        net.cluster(size)
        net.run(5.0)
        read.clear()
        net.run(seconds)
        assert 0 < len(read) / size / seconds <= most


def test_the_record_of_a_dead_node_disappears():
    net = VirtualNet(seed=5)
    nodes = net.cluster(3)
    net.run(3.0)
    net.crash("n1")
    assert net.run_until(net.converged, 10.0) is not None
    net.run(1.0)
    for node in (nodes[0], nodes[2]):
        assert set(node.core.view.records(net.now + node.clock_offset)) == {"n0", "n2"}


def known(net: VirtualNet, name: str) -> bool:
    node = net.nodes[name]
    return set(node.core.view.records(net.now + node.clock_offset)) == set(net.nodes)


def seen_blocks(net: VirtualNet, node, name: str) -> int:
    return node.core.view.get(name, net.now + node.clock_offset).blocks_used
