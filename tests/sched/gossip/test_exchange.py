"""Anti-entropy of records: one exchange brings two views to the newest of both, and nobody does all the asking."""

from __future__ import annotations

import random

import pytest

from sched.gossip.exchange import ENTRIES, OTHERS, OWN, QUICK, SLOWEST_S, VERSIONS, Exchange
from sched.gossip.record import NodeRecord
from sched.membership.events import SendPacket
from sched.membership.member import Member, presets
from sched.membership.packet import unseal
from tests.sched.gossip.test_state import record_of, view_of

LOCAL = presets["local"]


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
    """Exchanges per interval that a node with many peers and a changing load begins while others begin so many with
    it."""
    view = view_of(*(f"n{i}" for i in range(99)), own="a")
    exchange = Exchange(0.0, view, 1, LOCAL, random.Random(1))
    peers = [Member(f"n{i}", (f"n{i}", 1)) for i in range(99)]
    other = Exchange(0.0, view_of("a", own="n1"), 1, LOCAL, random.Random(2))
    (packet,), interval_s = other.tick(1.0, [Member("a", ("a", 1))]), LOCAL.state_s(100) / LOCAL.state_fanout
    count, intervals, per_interval = 0, 100, 20
    for step in range(intervals * per_interval):
        now = step / per_interval * interval_s
        view.publish(now, 0, NodeRecord(running=step))
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


def test_an_exchange_is_seldom_while_no_load_changes_and_comes_at_once_after_a_change():
    view = view_of("n1", own="a")
    exchange, peers = Exchange(0.0, view, 1, LOCAL, random.Random(1)), [Member("n1", ("n1", 1))]

    def begun_at(start: float, end: float) -> list[float]:
        """Times in milliseconds at which the node began an exchange."""
        return [ms for ms in range(round(1000 * start), round(1000 * end)) if exchange.tick(ms / 1000, peers)]

    full_ms = 1000 * LOCAL.state_s(2)
    busy, calm = begun_at(0.0, 8.0), begun_at(8.0, 16.0)
    assert busy[QUICK - 1] <= QUICK * full_ms and not exchange.quick
    assert 0 < len(calm) <= 8.0 / (OWN * SLOWEST_S) + 1

    view.merge(16.0, record_of("n1", work_s=0.0, running=1))
    assert begun_at(16.0, 16.001) == [16000], "the slow interval in which the change came is not waited for"
    assert len(begun_at(16.001, 16.0 + full_ms * QUICK / 1000)) >= QUICK - 1


def test_a_rate_that_is_low_already_stays():
    """Of the preset for long distances: twice per second with one peer."""
    exchange, wan = Exchange(0.0, view_of("n1", own="a"), 1, presets["wan"], random.Random(1)), presets["wan"]
    begun = [now / 10 for now in range(600) if exchange.tick(now / 10, [Member("n1", ("n1", 1))])]
    assert not exchange.quick and len(begun) >= 60 / wan.state_s(2)


@pytest.mark.parametrize(
    "record, is_change",
    [
        (record_of("n1", 0, 2, running=3, work_s=8.0), False),
        (record_of("n1", 0, 2, running=3, work_s=8.0, written_ms=5, age_s=1.0), False),
        (record_of("n1", 0, 2, running=3, work_s=9.0), True),
        (record_of("n1", 0, 2, running=4, work_s=8.0), True),
        (record_of("n1", 0, 2, running=3, work_s=8.0, nic_in=0.01, decode_step_s=0.1, digest_epoch=7), False),
        (record_of("n1", 0, 2, running=3, work_s=8.0, nic_in=0.1), True),
        (record_of("n1", 0, 2, running=3, work_s=8.0, blocks_used=1), True),
        (record_of("n1", 0, 2, running=3, work_s=8.0, flags=1), True),
        (record_of("n1", 1, 1, running=3, work_s=8.0), True),
    ],
)
def test_a_heartbeat_is_no_change(record, is_change):
    """Two seconds later, a node that had ten seconds of work has eight."""
    view = view_of("n1", own="a")
    assert view.merge(0.0, record_of("n1", running=3, work_s=10.0)) and view.take_change()
    assert not view.take_change()
    assert view.merge(2.0, record) and view.take_change() == is_change
    view.admit("n2")
    assert view.take_change()
