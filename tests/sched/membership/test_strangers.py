"""What one packet of a stranger can do to a cluster without a cluster key: no counter at the end of its range, planted
anywhere, may stop a node's gossip, and what was planted is outbid by the node that it is about."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sched.gossip.digest import CuckooDigest
from sched.gossip.digest_exchange import _state
from sched.gossip.record import NodeRecord, node_key
from sched.membership.events import Datagram
from sched.membership.member import Member, Status, Verdict
from sched.membership.packet import Kind, Message, encode_message, seal, tag_of
from tests.sched.gossip.test_digest_exchange import agree
from tests.sched.virtual import ROOT, GossipNode, VirtualNet

TOP = 2**32 - 1
STRANGER = ("203.0.113.9", 9)
TAG = tag_of(Member("x", ("h", 1), info={"root": ROOT}))
AROUND = [1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 2, TOP - 1, TOP]
"""Values of a counter of 32 bits where comparing goes wrong first."""


def cluster(seed: int) -> tuple[VirtualNet, dict[str, set[int]]]:
    """Four nodes that know each other's load and that each hold three blocks."""
    net = VirtualNet(seed)
    held = {node.name: {node_key(f"{node.name}-{i}") for i in range(3)} for node in net.cluster(4)}
    for name, keys in held.items():
        for key in keys:
            net.node(name).core.digests.own.add(key)
        net.node(name).load = NodeRecord(blocks_total=100, running=7)
    assert net.run_until(lambda: well(net, held), 30.0, 0.1) is not None
    return net, held


def well(net: VirtualNet, held: dict[str, set[int]]) -> bool:
    """Everybody sees everybody alive, with the load and the blocks that each has."""
    return net.converged() and agree(net, held) and all(_sees_truth(net, node) for node in net.up())


def _sees_truth(net: VirtualNet, node: GossipNode) -> bool:
    membership = node.core.membership
    return all(
        (record := node.core.record(net.now + node.clock_offset, other.name)) is not None
        and (record.running, record.blocks_total) == (7, 100)
        and (seen := membership.get(other.name)) is not None
        and (seen.status, seen.address) == (Status.ALIVE, other.address)
        for other in net.up()
    )


def say(net: VirtualNet, to: str, packet: bytes) -> None:
    net.feed(net.node(to), Datagram(STRANGER, packet))


def held_packet(about: str, epoch: int, seq: int) -> bytes:
    return seal(Kind.HELD, TAG, np.array([(node_key(about), epoch, seq)], _state).tobytes())


def copy_packets(about: str, epoch: int) -> list[bytes]:
    ghost = CuckooDigest(epoch)
    ghost.add(99)
    assert ghost.take_delta() is not None
    return [seal(Kind.COPY, TAG, node_key(about).to_bytes(8, "little") + page.pack()) for page in ghost.pages()]


def record_packet(about: str, incarnation: int, version: int) -> bytes:
    record = NodeRecord(node=node_key(about), incarnation=incarnation, version=version, blocks_total=1, work_s=3e38)
    return seal(Kind.DELTA, TAG, record.pack())


def statement(update: Member | Verdict) -> bytes:
    return encode_message(TAG, Message("gossip", "nobody", 0, updates=(update,)))


@pytest.mark.parametrize("seq", [0, TOP])
@pytest.mark.parametrize("epoch", AROUND)
def test_a_digest_state_that_nobody_can_have_stops_nothing(epoch, seq):
    net, held = cluster(seed=epoch % 97)
    say(net, "n0", held_packet("n0", epoch, seq))  # of the receiver itself
    say(net, "n1", held_packet("n0", epoch, seq))
    assert net.run_until(lambda: well(net, held), 30.0, 0.2) is not None
    net.run(5.0)
    net.node("n0").core.digests.own.add(12345)
    held["n0"].add(12345)
    assert net.run_until(lambda: well(net, held), 30.0, 0.2) is not None


@pytest.mark.parametrize("number", range(12))
def test_digests_planted_anywhere_are_outbid(number):
    """Also on opposite sides of the circle of numbers, where none is newer than all of them."""
    rng = random.Random(number)
    net, held = cluster(seed=number)
    mine = net.node("n0").core.digests.own.epoch
    for to in ("n1", "n2", "n3"):
        epoch = rng.choice([*AROUND, mine + 2**31, mine + 2**31 - 1]) % 2**32 or 1
        for packet in copy_packets("n0", epoch):
            say(net, to, packet)
    assert net.run_until(lambda: well(net, held), 120.0, 0.5) is not None
    assert not net.node("n1").core.digests.holders.mask(99)


@pytest.mark.parametrize("version", [1, 2**31, TOP])
@pytest.mark.parametrize("incarnation", [0, *AROUND])
def test_a_record_from_the_future_is_outbid(incarnation, version):
    net, held = cluster(seed=5)
    for to in ("n1", "n2", "n0"):
        say(net, to, record_packet("n0", incarnation, version))
    net.run(0.5)
    assert net.run_until(lambda: well(net, held), 60.0, 0.2) is not None
    net.node("n0").load = NodeRecord(blocks_total=100, running=7, waiting=3)
    net.run(3.0)
    seen = net.node("n3").core.record(net.now + net.node("n3").clock_offset, "n0")
    assert seen is not None and seen.waiting == 3, "what it tells afterwards is taken"


@pytest.mark.parametrize("status", [Status.SUSPECT, Status.DEAD, Status.LEFT])
@pytest.mark.parametrize("incarnation", AROUND)
def test_a_verdict_of_any_incarnation_is_refuted(incarnation, status):
    net, held = cluster(seed=7)
    for to in ("n1", "n2"):
        say(net, to, statement(Verdict("n0", incarnation, status, "n3")))
    net.run(1.0)
    assert net.run_until(lambda: well(net, held), 60.0, 0.2) is not None


@pytest.mark.parametrize("number", range(8))
def test_another_process_under_a_taken_name_is_outbid(number):
    """Each of the others is told another incarnation of it."""
    rng = random.Random(number)
    net, held = cluster(seed=number)
    for to in ("n1", "n2", "n3"):
        forged = Member("n0", STRANGER, incarnation=rng.choice(AROUND), info={"root": ROOT}, life=rng.getrandbits(32))
        say(net, to, statement(forged))
    net.run(1.0)
    assert net.run_until(lambda: well(net, held), 120.0, 0.5) is not None


def test_pages_that_no_owner_cuts_are_not_kept():
    """Half a million pages of two slots would be kept as the parts of one copy."""
    net, _ = cluster(seed=9)
    page = next(CuckooDigest(5, 1 << 12).pages())
    for start in range(0, 400, 2):
        small = type(page)(2**24 + 1, 0, page.buckets, start, page.slots[:2])
        say(net, "n1", seal(Kind.COPY, TAG, node_key("n0").to_bytes(8, "little") + small.pack()))
    counters = net.node("n1").core.digests.counters
    assert counters["dropped_malformed"] == 200
