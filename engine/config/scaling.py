"""The part of Config for the number of nodes: price and site of this one, and those that start and leave."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from string import Formatter

from engine.config.cache import CacheFields
from engine.config.field import flag
from sched.membership.member import MAX_COST

PLACEHOLDERS = {"action", "role", "name", "join"}
REQUIRED = {"action", "role", "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFields(CacheFields):
    node_cost: float = flag(
        1.0,
        "scaling",
        "price of this node per hour, in any unit that all nodes share: --placement mooncake-cost and scaling prefer "
        "cheap nodes, and explain, top and the metrics show it",
        unit="price",
        least=0.0,
        most=MAX_COST,
    )
    site: str | None = flag(
        None,
        "scaling",
        "site of this node: nodes with a fast network between them, such as one data centre; each site has a pool of "
        "its own, and a request goes to another site only if its queue is shorter by more than the distance; none = "
        "the cluster has one site",
        unit="name",
    )
    network_place: str | None = flag(
        None,
        "scaling",
        "where this node is in the network of its site, from the core down, such as pod1/rack3/host12: nodes whose "
        "places begin alike are near, acceptors learn how fast KV moves over each distance, and they also ask decode "
        "nodes near the prefill node; none = all nodes are equally far apart",
        unit="PART/PART/...",
    )
    site_link_limit_bytes: int = flag(
        0,
        "scaling",
        "bytes of KV per second that all nodes of this site together may read from each other site; the node fetches "
        "a prefix from there only if computing it takes longer; 0 = no KV moves between sites",
        least=0,
    )
    site_copy_ttl_ms: int = flag(
        600_000,
        "scaling",
        "blocks that this node reads from another site twice within this time are copied to its own site, where they "
        "stay until nobody has read them for as long",
        least=1000,
    )
    site_bound_tenants: str = flag(
        "none",
        "scaling",
        "tenants, by the cache_salt of their requests, whose requests and KV never leave the site that accepts them: "
        "team-a,team-b; give every node the same value",
        unit="TENANT,...",
    )
    scale_command: str | None = flag(
        None,
        "scaling",
        "command that starts a node, and later frees what it ran on, such as 'scripts/deploy/scale-local {action} "
        "{role} {name} {join}': {action} is start or stop, {role} the new node's --role, {name} its --node-id, {join} "
        "its --join; a start of a node that runs must do nothing. One of the nodes with this flag calls it; needs "
        "--scale-nodes",
        unit="command",
    )
    scale_nodes: str | None = flag(
        None,
        "scaling",
        "roles whose nodes start and leave with the load, and how many of each there may be, such as "
        "prefill=1..4,decode=1..8 or mixed=1..4; only nodes that --scale-command started leave again",
        unit="role=least..most,...",
    )
    expert_scale_command: str | None = flag(
        None,
        "scaling",
        "command that starts and ends ranks of this node with its load, from --expert-parallel-size to "
        "--max-expert-parallel-size, such as 'scripts/deploy/scale-local {action} {role} {name} {join} --model DIR': "
        "{action} is start or stop, {role} expert-rank, {name} the --name and {join} the --join of mooncake.py "
        "expert-rank; a start of a rank that runs must do nothing, a stop sends SIGTERM",
        unit="command",
    )
    scale_out_ms: int = flag(
        10_000,
        "scaling",
        "time for which a role must need more nodes, or a node more ranks, before they start",
        least=100,
    )
    scale_in_ms: int = flag(
        300_000,
        "scaling",
        "time for which a role must need fewer nodes, or a node fewer ranks, before they leave, and after any change",
        least=100,
    )
    scale_start_ms: int = flag(
        900_000, "scaling", "maximum time from a start to a ready node or rank; then the start has failed", least=100
    )


def bound_tenants(text: str) -> frozenset[str]:
    """The tenants of --site-bound-tenants."""
    return frozenset(filter(None, (part.strip() for part in text.split(",")))) if text != "none" else frozenset()


def command_parts(text: str) -> list[str]:
    """The arguments of --scale-command, with placeholders in braces; no shell reads them. Raises ValueError."""
    parts = shlex.split(text)
    used = {name for part in parts for _, name, _, _ in Formatter().parse(part) if name is not None}
    if unknown := sorted(used - PLACEHOLDERS):
        raise ValueError(f"{{{unknown[0]}}} is no placeholder; there are {', '.join(sorted(PLACEHOLDERS))}")
    if missing := sorted(REQUIRED - used):
        raise ValueError(f"it does not use {{{missing[0]}}}, so the command cannot know what to do")
    return parts
