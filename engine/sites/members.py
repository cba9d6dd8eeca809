"""The members of the cluster by site."""

from __future__ import annotations

from collections.abc import Collection

from net.gossip.driver import Gossip
from sched.membership.member import Member, Status


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


def others_shares(gossip: Gossip) -> dict[str, dict[str, int]]:
    """`shares` of the other sites that can be read. A question to a site waits for all homes there, so a site is left
    out while one of them is suspected: when the link is cut, nobody waits for it."""
    doubted = {one.site for one in gossip.members if one.share > 0 and one.status is not Status.ALIVE}
    own = gossip.me.site
    return {site: members for site, members in shares(gossip).items() if site != own and site not in doubted}


def reads_sites(roles: Collection[str]) -> bool:
    """Whether a node with these roles may read KV from other sites: only such nodes share the budgets of the links."""
    return "prefill" in roles


def readers(gossip: Gossip) -> int:
    """The number of nodes of this site that may read KV from other sites."""
    return sum(reads_sites(member.roles) for member in mates(gossip))
