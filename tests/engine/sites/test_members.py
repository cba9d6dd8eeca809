"""The nodes of a site that share the budgets of its links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.sites.members import readers, reads_sites
from sched.membership.member import Member


def member(name: str, site: str, *roles: str) -> Member:
    return Member(name, ("h", 1), roles=roles, info={"site": site})


def test_the_nodes_that_may_read_from_other_sites_are_those_that_are_counted():
    me = member("a", "east", "prefill")
    nodes = [me, member("b", "east", "prefill", "decode"), member("c", "east", "decode"), member("d", "east", "store")]
    gossip: Any = SimpleNamespace(me=me, members=[*nodes, member("e", "west", "prefill")])
    assert readers(gossip) == 2
    assert [node.node_id for node in nodes if reads_sites(node.roles)] == ["a", "b"]
