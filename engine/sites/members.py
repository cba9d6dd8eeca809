"""The members of the cluster by site."""

from __future__ import annotations

from collections.abc import Collection

from net.gossip.driver import Gossip
from sched.membership.member import Member


def mates(gossip: Gossip) -> list[Member]:
    """The members of this node's site."""
    return [member for member in gossip.members if member.site == gossip.me.site]


def shares(gossip: Gossip) -> dict[str, dict[str, int]]:
    """For every site, its members that store pooled blocks, with the bytes of their shares."""
    found: dict[str, dict[str, int]] = {}
    for member in gossip.members:
        if member.share > 0:
            found.setdefault(member.site, {})[member.node_id] = member.share
    return found


def reads_sites(roles: Collection[str]) -> bool:
    """Whether a node with these roles may read KV from other sites: only such nodes share the budgets of the links."""
    return "prefill" in roles


def readers(gossip: Gossip) -> int:
    """The number of nodes of this site that may read KV from other sites."""
    return sum(reads_sites(member.roles) for member in mates(gossip))
