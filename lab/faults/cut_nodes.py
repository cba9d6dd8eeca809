"""Cut one node off the network under load, and heal: no client error, the same tokens, nothing held afterwards.

    python scripts/faults.py cut-nodes                        2 nodes of each role, about 5 minutes; as root
    python scripts/faults.py cut-nodes --cases decode:both --cut-s 12 --json out.json

Every node is a process in a separate network namespace (lab/faults/networks/namespaces.py) and uses TCP. In each case
`streams` clients send one request after the other. Once half of the first requests have a third of their tokens, the
network drops the node's packets in both directions (`both`), to it (`in`) or from it (`out`). Connections do not
break, they fall silent. After --cut-s the network heals. When all nodes are one cluster again, the clients finish
their running requests and end. The clients also lose their connections to the node: clients of a cut acceptor
continue at another node after 3 s without a token, which is most of their pause. Every request must return exactly
the tokens of an undisturbed run, and every node's books must be balanced with nothing held. Exit code 1 if a check
failed, 3 if network namespaces are not available, with the reason.
"""

from __future__ import annotations

import asyncio
import socket
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import cast

import aiohttp

from lab.bench.common.results import Row
from lab.faults.checks import form, pause_rows
from lab.faults.client import ALL, Body, Load, Stream
from lab.faults.networks.namespaces import Namespaces, Way
from lab.faults.runner import Run, Scenario, run
from lab.flag_types import above_zero, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import parse_nodes

NODES = "prefill=2,decode=2,store=2"
QUICK_NODES = "mixed=2,store=2"
DOOR, OTHER_DOOR = "store-1", "store-0"
FIXED = {"store": OTHER_DOOR, "acceptor": DOOR}
"""For other roles the busiest node of the role is cut."""

CASES = "decode:both,prefill:both,store:both,acceptor:both,decode:in,decode:out,prefill:in,prefill:out"
WAYS = {"both": "cut off", "in": "hears nobody", "out": "is heard by nobody"}
CONNECT_S = 1.0
OF_A_LOST_ACCEPTOR = aiohttp.ClientTimeout(total=ALL.total, sock_read=3.0, sock_connect=0.5)
"""A client treats a node that may be cut off as lost after this long without a token, or without a connection."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", default=NODES, help="with two store nodes: clients talk to those")
    parser.add_argument("--streams", type=positive, default=12, help="clients")
    parser.add_argument("--tokens", type=positive, default=200, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=positive, default=300)
    parser.add_argument("--cases", default=CASES, help="ROLE:WAY joined by commas; ways are both, in and out")
    parser.add_argument(
        "--cut-s", type=above_zero, default=8.0, help="least length of a cut, which waits for a new request"
    )
    parser.add_argument("--net", default="local", choices=("local", "lan"), help="timing of the nodes' gossip")


def check(args: Namespace) -> None:
    """Raises ValueError or UsageError for cases that the nodes do not have."""
    names = [name for name, _ in parse_nodes(args.nodes)]
    if missing := [door for door in (DOOR, OTHER_DOOR) if door not in names]:
        raise ValueError(f"--nodes {args.nodes}: clients talk to {missing[0]}, which is missing")
    for case in args.cases.split(","):
        role, _, way = case.partition(":")
        if way not in WAYS:
            raise ValueError(f"--cases {case!r}: write ROLE:WAY, where WAY is one of {', '.join(WAYS)}")
        if role not in FIXED and not any(name.rpartition("-")[0] == role for name in names):
            raise ValueError(f"--cases {case!r}: no node of --nodes {args.nodes} has the role {role!r} only")
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: a cut must hit running streams, so at least 2")


def play(this: Run) -> None:
    args = this.args
    this.facts = {"model": "tiny"}
    flags = [*this.tiny(), "--transport", "tcp", "--net", args.net]
    with (
        Namespaces([name for name, _ in parse_nodes(args.nodes)]) as network,
        this.cluster(args.nodes, flags, network=network) as cluster,
    ):
        bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, DOOR, bodies)
        for case in args.cases.split(","):
            role, _, way = case.partition(":")
            title = f"{role} {WAYS[way]}"
            load, cut_at, healed_s = asyncio.run(_cut(args, cluster, network, bodies, role, cast(Way, way)))
            this.judge(title, cluster, calm, load)
            this.rows += case_rows(title, load.streams, cut_at, healed_s)


def case_rows(title: str, streams: Sequence[Stream], cut_at: float, healed_s: float) -> list[Row]:
    return [
        *pause_rows(title, streams, cut_at),
        Row(title, "heal to one cluster", "s", healed_s),
    ]


def busiest(cluster: LocalCluster, role: str) -> str:
    """The node with this role only that has the most requests."""
    nodes = rest.get(f"{cluster[OTHER_DOOR].url}/live", cluster.api_key)["nodes"]
    loads = {str(node["node_id"]): node["load"] for node in nodes if node["node_id"].startswith(f"{role}-")}
    names: list[str] = sorted(loads)
    return max(names, key=lambda name: loads[name]["running"] + loads[name]["waiting"])


def reachable(url: str) -> bool:
    """Whether a connection to this node opens. This process, too, is on the other side of a cut."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


async def _cut(
    args: Namespace, cluster: LocalCluster, network: Namespaces, bodies: Sequence[Body], role: str, way: Way
) -> tuple[Load, float, float]:
    """(the clients' results, time of the cut, seconds from the healing until all nodes are one cluster)"""
    doors = [cluster[DOOR].url, cluster[OTHER_DOOR].url]
    timeout = OF_A_LOST_ACCEPTOR if role == "acceptor" else ALL
    async with Load(doors, bodies, f"{role}-{way}", timeout=timeout, api_key=cluster.api_key) as load:
        await load.until(lambda: load.with_tokens(args.tokens // 3) >= len(bodies) / 2)
        victim = FIXED[role] if role in FIXED else await asyncio.to_thread(busiest, cluster, role)
        # Those streams may have ended during the search for the busiest node; the cut must hit running streams.
        await load.until(lambda: load.under_way(args.tokens // 2) > 0)
        network.cut(victim, way)
        cut_at = time.monotonic()
        if await asyncio.to_thread(reachable, cluster[victim].url):
            raise RuntimeError(f"{victim} is cut off, and can still be reached")
        await asyncio.sleep(max(0.0, args.cut_s - (time.monotonic() - cut_at)))
        # The cut must also hit new requests.
        await load.until(lambda: any(one.begun > cut_at for one in load.streams))
        network.heal(victim)
        healed_at = time.monotonic()
        await asyncio.to_thread(form, cluster)
        healed_s = time.monotonic() - healed_at
    return load, cut_at, healed_s


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        check=check,
        quick={"nodes": QUICK_NODES, "cases": "mixed:both", "cut_s": 4.0, "streams": 4, "tokens": 80},
    ),
)
