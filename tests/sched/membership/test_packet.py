"""Nothing that arrives may raise: damaged, foreign and malformed packets are counted and dropped."""

from __future__ import annotations

import random
from itertools import permutations

import orjson
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.core import GossipCore
from sched.gossip.state import NodeRecord
from sched.membership.events import Datagram, MemberDown, MemberUp, SendPacket
from sched.membership.member import Member, Status, Verdict, presets
from sched.membership.outbox import pages_of
from sched.membership.packet import (
    BODY_BYTES,
    PACKET_BYTES,
    Kind,
    Message,
    PacketError,
    decode_message,
    encode_message,
    encode_update,
    seal,
    tag_of,
    unseal,
)
from sched.membership.roster import Roster, Rumours

ME = Member("me", ("10.0.0.1", 1), info={"root": "aa", "model": "toy", "block_size": 16})
PEER = Member("peer", ("10.0.0.1", 2), "h:1", ("decode",), info={"root": "aa", "model": "toy", "block_size": 16})
TAG = tag_of(ME)


def core() -> GossipCore:
    return GossipCore(0.0, ME, presets["local"], random.Random(0), NodeRecord)


def dropped(node: GossipCore) -> int:
    return sum(count for name, count in node.counters.items() if name.startswith("dropped"))


def test_messages_survive_the_wire():
    message = Message("ask", "me", 3, 7, "peer", ("h", 9), updates=(PEER, Verdict("x", 4, Status.DEAD, "me")))
    kind, tag, body = unseal(encode_message(TAG, message))
    assert (kind, tag, decode_message(body)) == (Kind.SWIM, TAG, message)


@seed(1)
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=PACKET_BYTES + 50))
def test_random_bytes_are_dropped_and_counted(payload):
    node = core()
    assert node.handle(1.0, Datagram(("10.0.0.9", 9), payload)) == []
    assert dropped(node) == 1


@seed(2)
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Kind)), st.binary(max_size=200))
def test_random_bodies_under_a_good_header_never_raise(kind, body):
    core().handle(1.0, Datagram(("10.0.0.9", 9), seal(kind, TAG, body)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
honest = orjson.loads(unseal(encode_message(TAG, Message("join", "peer", 0, 1, "me", ("h", 1), updates=(PEER,))))[2])


@seed(3)
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["ping", "ack", "ask", "gossip", "join", "welcome", "refuse", "sync", "synced", "other"]),
    st.dictionaries(st.sampled_from([*honest, "page", "pages", "reason"]), json_values, max_size=3),
    st.dictionaries(st.sampled_from([*honest["updates"][0], "by"]), json_values, max_size=2),
)
def test_messages_with_wrong_fields_never_raise(kind, fields, update_fields):
    node = core()
    message = honest | {"kind": kind, "updates": [honest["updates"][0] | update_fields]} | fields
    body = orjson.dumps(message)
    if len(body) > BODY_BYTES:
        return
    for now in (1.0, 2.0, 3.0):
        effects = node.handle(now, Datagram(("10.0.0.9", 9), seal(Kind.SWIM, TAG, body)))
        assert all(len(e.payload) <= PACKET_BYTES for e in effects if isinstance(e, SendPacket))


@seed(4)
@settings(deadline=None)
@given(st.data())
def test_a_flipped_bit_is_noticed(data):
    datagram = bytearray(encode_message(TAG, Message("gossip", "peer", 0, updates=(PEER,))))
    datagram[data.draw(st.integers(0, len(datagram) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    node = core()
    assert not any(isinstance(e, MemberUp) for e in node.handle(1.0, Datagram(("h", 1), bytes(datagram))))
    assert dropped(node) == 1


@pytest.mark.parametrize(
    "payload, why",
    [
        (b"", "size"),
        (b"x" * 1401, "size"),
        (b"GET / HTTP/1.1\r\n", "magic"),
        (seal(Kind.SWIM, TAG, b"{}"), "malformed"),
        (seal(Kind.SWIM, TAG, b"[" * 1300), "malformed"),
        (seal(Kind.SWIM, TAG + 1, unseal(encode_message(TAG, Message("ping", "p", 0)))[2]), "foreign"),
        (seal(Kind.DELTA, TAG + 1, b""), "foreign"),
        (seal(Kind.DELTA, TAG, b"x" * 63), "malformed"),
        (seal(Kind.DELTA, TAG, b"\xff" * 64), "malformed"),
        (seal(Kind.DIGEST, TAG, b"x"), "malformed"),
        (b"Mk\x01" + seal(Kind.SWIM, TAG, b"{}")[3:], "version"),
        (b"Mk\x02\x7f" + seal(Kind.SWIM, TAG, b"{}")[4:], "kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_reason_has_its_counter(payload, why):
    node = core()
    node.handle(0.0, Datagram(("h", 1), payload))
    assert node.counters == {f"dropped_{why}": 1}


def test_too_long_a_body_is_an_error_of_the_sender():
    with pytest.raises(ValueError, match="limit"):
        seal(Kind.DELTA, TAG, b"x" * (BODY_BYTES + 1))
    with pytest.raises(PacketError):
        unseal(b"short")


def test_pages_hold_every_member_once_and_fit():
    members = [Member(f"node-{i}", ("10.0.0.1", i), info={"model": "m" * (i % 500)}) for i in range(100)]
    pages = pages_of(members)
    assert [member for page in pages for member in page] == members
    for number, page in enumerate(pages):
        encode_message(TAG, Message("sync", "m" * 64, 2**32 - 1, page=number, pages=len(pages), updates=page))


def test_rumours_are_told_a_bounded_number_of_times_and_the_newest_replaces_the_older():
    rumours = Rumours()
    rumours.add(PEER)
    rumours.add(Verdict("peer", 1, Status.DEAD, "me"))
    dead = encode_update(Verdict("peer", 1, Status.DEAD, "me"))
    assert [rumours.take(1000, limit=3) for _ in range(4)] == [[dead], [dead], [dead], []]


def test_the_least_told_rumours_go_first_into_a_small_packet():
    rumours = Rumours()
    for i in range(6):
        rumours.add(Verdict(f"n{i}", 1, Status.DEAD, "me"))
    size = len(encode_update(Verdict("n0", 1, Status.DEAD, "me"))) + 1
    taken = [update for _ in range(3) for update in rumours.take(2 * size, limit=4)]
    assert len(set(taken)) == 6


statements = st.lists(
    st.one_of(
        st.builds(Verdict, st.just("x"), st.integers(0, 3), st.sampled_from(Status), st.just("s")),
        st.builds(
            lambda incarnation: Member("x", ("h", 1), incarnation=incarnation, info={"root": "aa"}), st.integers(0, 3)
        ),
    ),
    min_size=1,
    max_size=4,
)


@seed(5)
@settings(deadline=None)
@given(statements)
def test_the_roster_does_not_depend_on_the_order_of_what_it_hears(heard):
    outcomes = set()
    for order in permutations(heard):
        roster = Roster()
        roster.merge(0.0, Member("x", ("h", 1), info={"root": "aa"}))
        for statement in [*order, *order[:2]]:
            roster.merge(0.0, statement)
        outcomes.add(roster.get("x").order)
    assert outcomes == {max((0, Status.ALIVE), *((s.incarnation, s.status) for s in heard))}


def test_downs_and_ups_alternate():
    node = core()
    log = []
    for update in (PEER, PEER, Verdict("peer", 0, Status.DEAD, "x"), Verdict("peer", 0, Status.LEFT, "x"), PEER):
        payload = encode_message(TAG, Message("gossip", "other", 0, updates=(update,)))
        log += node.handle(1.0, Datagram(("h", 1), payload))
    payload = encode_message(TAG, Message("gossip", "other", 0, updates=(Member("peer", ("h", 2), incarnation=1),)))
    log += node.handle(1.0, Datagram(("h", 1), payload))
    seen = [type(effect) for effect in log if not isinstance(effect, SendPacket)]
    assert seen == [MemberUp, MemberDown, MemberUp]
