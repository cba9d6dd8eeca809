"""Digests over a virtual network: everybody knows what everybody holds a few rounds after the last change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from sched.gossip.digest import CuckooDigest, assemble
from sched.gossip.digest_exchange import KEPT_DELTAS, DigestExchange
from sched.gossip.record import node_key
from sched.membership.events import Datagram
from sched.membership.member import presets
from sched.membership.packet import Kind, unseal
from tests.sched.virtual import GossipNode, VirtualNet

LOCAL = presets["local"]


def agree(net: VirtualNet, held: dict[str, set[int]]) -> bool:
    """Every node answers for every node as that node's own digest does, and misses nothing it holds."""
    up = net.up()
    for node in up:
        holders = node.core.digests.holders
        for other in up:
            own = other.core.digests.own
            if not held[other.name] and holders.state(other.name) is None:
                continue  # never used
            if own.changed or holders.state(other.name) != (own.epoch, own.seq):
                return False
            bit = 1 << holders.index(other.name)
            assert all(holders.mask(key) & bit for key in held[other.name])
    return True


def churn(net: VirtualNet, held: dict[str, set[int]], node: GossipNode, rng: random.Random, changes: int) -> None:
    own = node.core.digests.own
    for _ in range(changes):
        if held[node.name] and rng.random() < 0.4:
            key = rng.choice(sorted(held[node.name]))
            own.discard(key)
            held[node.name].remove(key)
        else:
            key = rng.getrandbits(64)
            own.add(key)
            held[node.name].add(key)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_what_everybody_holds_is_known_everywhere_soon_after(loss):
    net = VirtualNet(seed=1, loss=loss)
    nodes, rng = net.cluster(6), random.Random(2)
    held: dict[str, set[int]] = {node.name: set() for node in nodes}
    for _ in range(8):
        for node in nodes:
            churn(net, held, node, rng, rng.randrange(60))
        net.run(rng.random() * 2)
    assert net.run_until(lambda: agree(net, held), 40.0, 0.2) is not None
    counters = [node.core.digests.counters for node in nodes]
    assert all(c["digest_deltas"] > c["digest_copies"] for c in counters), "changes travel as deltas"
    late = net.start("late")
    held["late"] = set()
    net.join("late", "n0")
    assert net.run_until(lambda: net.converged() and agree(net, held), 40.0, 0.2) is not None
    assert late.core.digests.counters["digest_copies"] >= 6


def test_a_node_that_was_cut_off_for_long_gets_whole_copies_and_a_restarted_one_starts_anew():
    net = VirtualNet(seed=3)
    nodes, rng = net.cluster(4), random.Random(4)
    held: dict[str, set[int]] = {node.name: set() for node in nodes}
    assert net.run_until(lambda: net.converged() and agree(net, held), 40.0, 0.2) is not None
    net.partition(["n0"], ["n1", "n2", "n3"])
    for _ in range(KEPT_DELTAS + 4):
        for node in nodes[1:]:
            churn(net, held, node, rng, 5)
        net.run(1.0)
    net.heal()
    assert net.run_until(lambda: net.converged() and agree(net, held), 60.0, 0.2) is not None
    net.crash("n1")
    net.start("n1", address=nodes[1].address)
    net.join("n1", "n2")
    held["n1"] = {7}
    net.node("n1").core.digests.own.add(7)
    assert net.run_until(lambda: net.converged() and agree(net, held), 60.0, 0.2) is not None


def test_nodes_that_hold_the_same_have_nothing_to_say_but_what_they_hold():
    net = VirtualNet(seed=6)
    for node in net.cluster(5):
        node.core.digests.own.add(7)
    net.run(20.0)
    kinds: list[Kind] = []
    net.watches.append(
        lambda node, event: kinds.append(unseal(event.payload)[0]) if isinstance(event, Datagram) else None
    )
    net.run(10.0)
    assert kinds.count(Kind.CHANGES) == kinds.count(Kind.COPY) == 0
    rounds = 10 * 5 / LOCAL.digest_period_s
    assert kinds.count(Kind.HELD) <= (rounds + 5) * LOCAL.state_fanout, "nobody answers what is no news"


def test_a_digest_of_a_former_process_is_outbid_by_its_owner():
    net = VirtualNet(seed=5)
    nodes = net.cluster(3)
    held: dict[str, set[int]] = {node.name: set() for node in nodes}
    churn(net, held, nodes[0], random.Random(1), 20)
    assert net.run_until(lambda: net.converged() and agree(net, held), 40.0, 0.2) is not None
    ghost = CuckooDigest(epoch=nodes[0].core.digests.own.epoch + 77)
    ghost.add(99)
    assert ghost.take_delta() is not None
    nodes[1].core.digests.holders.load("n0", *assemble(ghost.pages()))
    assert net.run_until(lambda: agree(net, held), 40.0, 0.2) is not None
    assert nodes[0].core.digests.own.epoch > ghost.epoch and not nodes[1].core.digests.holders.mask(99)


@seed(1)
@given(st.sampled_from([Kind.HELD, Kind.CHANGES, Kind.COPY]), st.binary(max_size=120), st.booleans())
def test_any_body_is_taken_or_counted(kind, body, known):
    exchange = DigestExchange(0.0, "me", 1, LOCAL, random.Random(1))
    exchange.admit("x")
    if known:
        body = node_key("x").to_bytes(8, "little") + body
    for packet in exchange.receive(("h", 1), kind, 1, body):
        assert len(packet.payload) <= 1400
    assert exchange.receive(("h", 1), kind, 2, body) == [] and exchange.counters["dropped_foreign"] == 1
