"""Whom an acceptor takes into account, and that what it keeps from view to view follows every change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from cache.block import BlockGeometry
from engine.front.known import CONTEXT_TOKENS, Known, Neighbours
from sched.gossip.holders import Holders
from sched.gossip.load_word import DRAINING, READING
from sched.gossip.record import RECORD, NodeRecord
from sched.membership.member import Member, Status
from sched.placement.measured_links import MeasuredLinks

GEOMETRY = BlockGeometry(2, 2, 8, 16, "float32")


class World:
    """Gossip of a few nodes, whose members and records a test changes."""

    def __init__(self, *members: Member) -> None:
        self.me, *mates = members
        self.mates: list[Member] = mates
        self.holders = Holders()
        self.core = SimpleNamespace(digests=SimpleNamespace(holders=self.holders), mates=lambda: self.mates)
        self.records = {member.node_id: NodeRecord(version=1, blocks_total=100) for member in members}
        self.neighbours = Neighbours(cast(Any, self), MeasuredLinks(), 256, cast(Any, None), GEOMETRY)
        self.now = 0.0

    @property
    def table(self) -> tuple[list[str], np.ndarray]:
        rows = np.frombuffer(b"".join(record.pack() for record in self.records.values()), RECORD)
        return list(self.records), rows

    def elsewhere(self, rng: Any) -> list[Member]:
        return []

    def change(self, node: str, **values: Any) -> None:
        """As gossip does it: a list of its own for every state of the members."""
        self.mates = [replace(one, **values) if one.node_id == node else one for one in self.mates]

    def known(self) -> Known:
        self.now += 1.0
        return self.neighbours.known(self.now)

    def names(self) -> list[str]:
        return [member.node_id for member in self.known().members]


def member(name: str, *roles: str) -> Member:
    return Member(name, ("127.0.0.1", 1), roles=roles)


def test_a_suspect_is_left_out_while_another_node_does_what_it_does():
    world = World(member("door", "store"), member("p", "prefill"), member("d", "decode"), member("e", "decode"))
    assert world.names() == ["p", "d", "e"]
    world.change("d", status=Status.SUSPECT)
    assert world.names() == ["p", "e"]
    world.change("e", status=Status.SUSPECT)
    assert world.names() == ["p", "d", "e"], "busy is not gone: nobody else decodes"
    world.change("d", status=Status.ALIVE)
    assert world.names() == ["p", "d"]


def test_views_follow_members_records_flags_and_digests():
    world = World(member("door", "prefill", "decode"), member("a", "prefill", "decode"))
    first = world.known()
    again = world.known()
    assert again.view is not first.view and again.members is first.members, "nothing changed but the loads"
    world.records["a"] = NodeRecord(version=2, blocks_total=100, work_s=7.0)
    assert world.known().view.work_until[1] == world.now + 7.0
    assert world.known().places.tolist() == [-1, -1]
    world.holders.admit("a")
    assert world.known().places.tolist() == [-1, 0]
    world.records["a"] = NodeRecord(version=3, blocks_total=100, flags=DRAINING)
    assert world.names() == ["door"]
    world.records["a"] = NodeRecord(version=3, blocks_total=100, flags=READING)
    assert world.names() == ["door"], "it has not got the weights that the cluster serves"
    world.records["a"] = NodeRecord(version=4)
    assert [one.node_id for one in world.known().strangers] == ["a"], "it is loading its model"
    world.records |= {"a": NodeRecord(version=5, blocks_total=100), "b": NodeRecord(version=1, blocks_total=9)}
    world.mates = [*world.mates, member("b", "decode")]
    last = world.known()
    assert [one.node_id for one in last.members] == ["door", "a", "b"] == last.view.ids
    assert last.view.prefills.tolist() == [True, True, False] and {name for _, name in last.ring} == {"door", "a"}


def test_the_nodes_of_one_site():
    here, there = {"site": "a"}, {"site": "b"}
    world = World(
        replace(member("p1", "prefill"), info=here),
        replace(member("p2", "prefill"), info=there),
        replace(member("d1", "decode"), info=here),
    )
    world.records["p2"] = replace(world.records["p2"], work_s=3.0)
    known = world.known()
    assert known.sites == {"a", "b"}
    part = known.at_site("b")
    assert part.sites == {"b"}
    assert [one.node_id for one in part.members] == part.view.ids == ["p2"]
    assert [node for _, node in part.ring] == ["p2"] and len(part.places) == 1
    part.view.charge(world.now, "p2", 5.0)
    assert part.view.work_until[0] - known.view.work_until[known.view.index["p2"]] == 5.0, "no common memory"
    assert known.at_site("c").members == []


def test_nodes_with_too_short_a_context_are_left_out_unless_a_role_would_be_missing():
    short, long = {CONTEXT_TOKENS: 64}, {CONTEXT_TOKENS: 512}
    me = Member("door", ("127.0.0.1", 1), roles=("prefill",), info=long)
    mates = [Member("d", ("127.0.0.1", 1), roles=("decode",), info=short), member("e", "decode")]
    world = World(me, *mates)
    known = world.known()
    assert known.continuing(62) is known, "63 tokens and one more"
    left = known.continuing(63)
    assert [one.node_id for one in left.members] == left.view.ids == ["door", "e"]
    assert left.view.decodes.tolist() == [False, True] and len(left.places) == 2
    assert known.continuing(511) is known, "nobody else prefills"
