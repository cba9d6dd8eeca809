"""Anti-entropy of records: one exchange brings two views to the newest of both, and nobody does all the asking."""

from __future__ import annotations

import random

import pytest

from sched.gossip.exchange import ENTRIES, OTHERS, OWN, VERSIONS, Exchange
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
