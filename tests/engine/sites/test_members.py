"""The nodes of a site that share the budgets of its links, and the sites that can be read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from engine.sites.members import others_shares, readers, reads_sites
from sched.membership.member import Member, Status


def member(name: str, site: str, *roles: str) -> Member:
    return Member(name, ("h", 1), roles=roles, info={"site": site})


def test_the_nodes_that_may_read_from_other_sites_are_those_that_are_counted():
    me = member("a", "east", "prefill")
    nodes = [me, member("b", "east", "prefill", "decode"), member("c", "east", "decode"), member("d", "east", "store")]
    gossip: Any = SimpleNamespace(me=me, members=[*nodes, member("e", "west", "prefill")])
    assert readers(gossip) == 2
    assert [node.node_id for node in nodes if reads_sites(node.roles)] == ["a", "b"]


def test_a_site_with_a_suspected_home_is_not_read():
    """When the link is cut, a prompt would wait for the answer of that site as long as it takes to compute."""
    info = {"share": 100}
    me = Member("a", ("h", 1), info={"site": "east"} | info)
    west = [Member(name, ("h", 1), info={"site": "west"} | info) for name in "bc"]
    north = Member("d", ("h", 1), info={"site": "north"} | info)
    idle = Member("e", ("h", 1), info={"site": "north"}, status=Status.SUSPECT)
    gossip: Any = SimpleNamespace(me=me, members=[me, *west, north, idle])
    assert others_shares(gossip) == {"west": {"b": 100, "c": 100}, "north": {"d": 100}}
    gossip.members[1] = replace(west[0], status=Status.SUSPECT)
    assert others_shares(gossip) == {"north": {"d": 100}}, "the others of the site have a part of the blocks only"
