from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.events import SendPacket
from sched.exchange import ENTRIES, OTHERS, OWN, VERSIONS, Exchange
from sched.load_word import LoadWord
from sched.member import Member, presets
from sched.packet import unseal
from sched.record import LOAD_WORD_BYTES, RECORD, RECORD_BYTES
from sched.state import HEARTBEAT_S, ClusterView, NodeRecord, node_key
from tests.sched.virtual import VirtualNet

LOCAL = presets["local"]
u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
time_s = st.floats(0, 1e6, width=32)
fill = st.integers(0, 255).map(lambda part: part / 255)
records = st.builds(
    NodeRecord,
    node=u64,
    incarnation=u32,
    version=u32,
    running=u16,
    max_running=u16,
    running_soon=u16,
    queued_tokens=u32,
    blocks_used=u32,
    blocks_soon=u32,
    blocks_total=u32,
    health=st.integers(0, 7),
    flags=u16,
    digest_epoch=u16,
    settled=u64,
    written_ms=u32,
    residual=st.floats(0, 60_000, width=16),
    age_s=time_s,
    work_s=time_s,
    prefill_a0=time_s,
    prefill_a1=time_s,
    prefill_a2=time_s,
    decode_step_s=time_s,
    dram_fill=fill,
    ssd_fill=fill,
    nic_in=fill,
    nic_out=fill,
)


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


# --- the record


@seed(1)
@settings(deadline=None)
@given(records, u16, u16, u16)
def test_a_record_survives_packing(record, interactive, standard, batch):
    record = replace(
        record,
        waiting=interactive + standard + batch,
        waiting_interactive=interactive,
        waiting_batch=batch,
    )
    data = record.pack()
    assert len(data) == RECORD_BYTES == 92
    assert NodeRecord.unpack(data) == record and record.waiting_standard == standard
    [row] = np.frombuffer(data, RECORD)
    assert NodeRecord.of_row(row.item()) == record, "the numpy layout and the struct are one"


@seed(5)
@settings(deadline=None)
@given(records, u16, u16)
def test_a_record_begins_with_the_load_word(record, interactive, batch):
    record = replace(
        record, waiting=interactive + batch + 3, waiting_interactive=interactive, waiting_batch=batch, settled=0
    )
    waiting = {"interactive": interactive, "standard": 3, "batch": batch}
    word = LoadWord.of(record, waiting, record.flags, record.digest_epoch)
    word = replace(word, version=record.version, written_ms=record.written_ms)
    assert word.pack()[:LOAD_WORD_BYTES] == record.pack()[:LOAD_WORD_BYTES]


def test_counters_saturate_instead_of_failing():
    record = NodeRecord.unpack(NodeRecord(waiting=100_000, queued_tokens=2**40).pack())
    assert (record.waiting, record.queued_tokens) == (65_535, 2**32 - 1)


@seed(2)
@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_any_bytes_are_a_sane_record_or_refused(data):
    view = view_of("a")
    try:
        record = NodeRecord.unpack(data)
    except ValueError:
        with pytest.raises(ValueError, match="finite"):
            view.merge_packed(0.0, data)
        return
    assert record.work_s >= 0 and record.pack() == data[:-1] + b"\0"
    assert view.merge_packed(0.0, data) == (0, 1)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match="92 bytes"):
        NodeRecord.unpack(b"x" * 63)


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
    assert view.merge(0.0, record_of("a", 0, 1)), "a node that came back starts anew"


def test_own_increments_count_until_the_next_record():
    view = view_of("a")
    view.charge("a", 1.0)
    view.merge(0.0, record_of("a", work_s=1.0, waiting=2))
    view.charge("a", 3.0)
    assert view.get("a", 0.0).work_s == 4.0 and view.get("a", 0.0).waiting == 3
    assert view.get("a", 2.0).work_s == 2.0, "charged work drains too, one after the other"
    passed = told(view, 0.0, "a")
    assert passed.work_s == 1.0, "what is passed on is what the owner said"
    view.merge(2.0, record_of("a", 0, 2, work_s=2.5, waiting=3))
    assert view.get("a", 2.0).work_s == 2.5 and view.get("a", 2.0).waiting == 3


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


# --- anti-entropy


def carry(packets: list[SendPacket], to: Exchange, now: float = 0.0) -> list[SendPacket]:
    return [answer for packet in packets for answer in to.receive(now, ("peer", 1), *unseal(packet.payload))]


@pytest.mark.parametrize("strangers", [0, 3])
@pytest.mark.parametrize("size", [2, 20, 700])
def test_one_exchange_brings_two_views_to_the_newest_of_both(size, strangers):
    """Whether the two know the same members, and compare by row, or not, and compare by key."""
    names = [f"n{i}" for i in range(size)]
    assert size < 100 or size > max(2 * ENTRIES, VERSIONS), "the versions of the large case need several packets"
    rng = random.Random(size)
    views = [view_of(*names, own="a"), view_of(*names, *(f"s{i}" for i in range(strangers)), own="b")]
    views[0].admit("b")
    views[1].admit("a")
    for view in views:
        for name in names:
            if rng.random() < 0.7:
                view.merge(0.0, record_of(name, 0, rng.randrange(1, 4)))
    newest = {
        name: max((view.get(name, 0.0).order for view in views if view.get(name, 0.0)), default=None) for name in names
    }
    a, b = (Exchange(0.0, view, 1, LOCAL, rng) for view in views)
    packets = carry(a.tick(1.0, [Member("b", ("b", 1))]), b)
    for to in (a, b, a):
        packets = carry(packets, to)
    for view in views:
        assert {name: record.order for name, record in view.records(0.0).items()} == {
            name: order for name, order in newest.items() if order
        }
    assert (b.counters["summaries_matched"] > 0) == (strangers == 0)


def test_an_incarnation_known_to_one_only_is_compared_by_key():
    views = [view_of("x", "b", own="a"), view_of("x", "a", own="b")]
    views[0].merge(0.0, record_of("x", 0, 9))
    views[1].merge(0.0, record_of("x", 1, 1))
    a, b = (Exchange(0.0, view, 1, LOCAL, random.Random(1)) for view in views)
    packets = a.tick(1.0, [Member("b", ("b", 1))])
    for to in (b, a, b, a):
        packets = carry(packets, to)
    assert views[0].get("x", 0.0).order == (1, 1) and b.counters["summaries_unmatched"] == 1


def begun(asked_per_interval: float) -> float:
    """Exchanges per interval that a node with many peers begins while others begin so many with it."""
    exchange = Exchange(0.0, view_of(*(f"n{i}" for i in range(99)), own="a"), 1, LOCAL, random.Random(1))
    peers = [Member(f"n{i}", (f"n{i}", 1)) for i in range(99)]
    other = Exchange(0.0, view_of("a", own="n1"), 1, LOCAL, random.Random(2))
    (packet,), interval_s = other.tick(1.0, [Member("a", ("a", 1))]), LOCAL.state_s(100) / LOCAL.state_fanout
    count, intervals, per_interval = 0, 300, 20
    for step in range(intervals * per_interval):
        now = step / per_interval * interval_s
        count += bool(exchange.tick(now, peers))
        asked = int((step + 1) * asked_per_interval / per_interval) - int(step * asked_per_interval / per_interval)
        for _ in range(asked):
            exchange.receive(now, ("n1", 1), *unseal(packet.payload))
    return count / intervals


def test_who_is_asked_more_asks_less_but_never_stops():
    alone, usual, often, flooded = (begun(asked) for asked in (0.0, 1.0, 2.0, 50.0))
    assert alone > usual > often > flooded > 0.4
    assert usual + 1 == pytest.approx(2 / (OWN + OTHERS), rel=0.2), "as many as it is asked"
    assert alone == pytest.approx(1 / OWN, rel=0.1)


@seed(6)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30), st.integers(0, 2**32))
def test_rows_follow_the_members(steps, number):
    """Nodes come and go in any order; whoever stays keeps its record, whoever comes back starts anew."""
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
