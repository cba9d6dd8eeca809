#!/usr/bin/env python3
"""Cut one node off the network under load, and heal: no client error, the same tokens, nothing held afterwards.

    python scripts/faults.py cut-nodes                        2 prefill, 2 decode and 2 store nodes, about 5 minutes; as
    root
    python scripts/faults.py cut-nodes --cases decode:both --cut-s 12 --json out.json

Every node is a process in a network namespace of its own (lab/faults/namespaces.py) and speaks TCP. Per case
`streams` clients send one request after the other; once half of the first ones have a third of their tokens, packets of
the node are lost both ways, into it (`in`: it hears nobody) or out of it (`out`: nobody hears it). Connections do not
break, they fall silent. After --cut-s the network heals; the clients end with their requests under way when all nodes
are one cluster again. The clients are cut off from the node, too: those of the acceptor go on at another node. Every
request must give exactly the tokens it gives undisturbed, and every node's books must be balanced with nothing held.
Exit code 1 if anything was wrong, 3 where network namespaces cannot be had, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp

from lab.bench.common.results import Row, add_result_flags, report
from lab.faults.checks import GOAL_S, differences, form, pause_rows, settle
from lab.faults.client import Load, Stream, random_bodies, stream
from lab.faults.namespaces import Namespaces, NoNamespaces, Way
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import parse_nodes

NODES = "prefill=2,decode=2,store=2"
QUICK_NODES = "mixed=2,store=2"
DOOR, OTHER_DOOR = "store-1", "store-0"
FIXED = {"store": OTHER_DOOR, "acceptor": DOOR}
"""Other roles: the node of this role that is busiest then."""

CASES = "decode:both,prefill:both,store:both,acceptor:both,decode:in,decode:out,prefill:in,prefill:out"
WAYS = {"both": "cut off", "in": "hears nobody", "out": "is heard by nobody"}
API_KEY = "of-the-lab"  # /debug/ is open to other hosts with a key only, and the nodes have addresses of their own
UNAVAILABLE = 3
REQUEST_S = 120.0
SILENT_S = 3.0
"""A client of a node that may be cut off takes it for lost after so long without a token ..."""

UNREACHED_S = 0.5
"""... or without a connection."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default=NODES, help="with two store nodes: clients talk to those")
    parser.add_argument("--streams", type=int, default=12, help="clients")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--cases", default=CASES, help="ROLE:WAY joined by commas; ways are both, in and out")
    parser.add_argument("--cut-s", type=float, default=8.0, help="how long a cut lasts, and until a new request came")
    parser.add_argument("--net", default="local", choices=("local", "lan"), help="timing of the nodes' gossip")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.nodes, args.cases, args.cut_s = QUICK_NODES, "mixed:both", min(args.cut_s, 4.0)
        args.streams, args.tokens = min(args.streams, 4), min(args.tokens, 80)
    try:
        with Namespaces([name for name, _ in parse_nodes(args.nodes)]) as network:
            rows, wrong = measure(args, network)
    except NoNamespaces as reason:
        print(f"cut_nodes: {reason}", file=sys.stderr)
        return UNAVAILABLE
    config = {name: getattr(args, name) for name in ("nodes", "streams", "tokens", "prompt_tokens", "cut_s", "net")}
    report(config | {"model": "tiny", "seed": args.seed, "wrong": len(wrong)}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


def measure(args: argparse.Namespace, network: Namespaces) -> tuple[list[Row], list[str]]:
    """(rows, what was wrong)"""
    bodies = random_bodies(args.streams, args.prompt_tokens, args.tokens, args.seed)
    print(f"seed {args.seed}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*tiny_model(Path(scratch)), "--max-model-len", "4096", "--transport", "tcp", "--net", args.net]
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        with LocalCluster(args.nodes, flags, run_dir=run_dir, network=network, api_key=API_KEY) as cluster:
            model = rest.get(f"{cluster[DOOR].url}/v1/models", API_KEY)["data"][0]["id"]
            bodies = [body | {"model": model} for body in bodies]
            calm = asyncio.run(_calm(cluster, bodies))
            wrong = [f"undisturbed: {one.error}" for one in calm if one.error]
            for case in args.cases.split(","):
                role, _, way = case.partition(":")
                title = f"{role} {WAYS[way]}"
                load, cut_at, healed_s = asyncio.run(_disturbed(args, cluster, network, bodies, role, cast(Way, way)))
                wrong += differences(title, [calm[number] for number in load.clients], load.streams)
                wrong += settle(cluster)
                rows += case_rows(title, load.streams, cut_at, healed_s)
                print(f"{title}: {len(load.streams)} requests, {len(wrong)} wrong so far", file=sys.stderr)
            if wrong:
                for node in cluster.nodes:
                    print(f"--- {node.name}", *node.last_lines(30), sep="\n", file=sys.stderr)
    return rows, wrong


def case_rows(title: str, streams: Sequence[Stream], cut_at: float, healed_s: float) -> list[Row]:
    """Beside the pauses of streams under way: how long those without a token at the cut, and later ones, waited."""
    waits = [one.at[0] - max(one.begun, cut_at) for one in streams if one.at and one.at[0] > cut_at]
    return [
        Row(title, "requests", "", float(len(streams))),
        *pause_rows(title, streams, cut_at),
        Row(title, "longest wait for a first token", "s", max(waits, default=None), limits={"goal": GOAL_S}),
        Row(title, "heal to one cluster", "s", healed_s),
    ]


def busiest(cluster: LocalCluster, role: str) -> str:
    """The node of this one role with the most requests."""
    nodes = rest.get(f"{cluster[OTHER_DOOR].url}/live", API_KEY)["nodes"]
    loads = {str(node["node_id"]): node["load"] for node in nodes if node["node_id"].startswith(f"{role}-")}
    names: list[str] = sorted(loads)
    return max(names, key=lambda name: loads[name]["running"] + loads[name]["waiting"])


def _session(role: str) -> aiohttp.ClientSession:
    patience = {"sock_read": SILENT_S, "sock_connect": UNREACHED_S} if role == "acceptor" else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, **patience)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=headers)


async def _calm(cluster: LocalCluster, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    streams = [Stream() for _ in bodies]
    async with _session("calm") as session:
        await asyncio.gather(
            *(
                stream(session, [cluster[DOOR].url], body, f"calm-{number}", one)
                for number, (body, one) in enumerate(zip(bodies, streams, strict=True))
            )
        )
    return streams


async def _disturbed(
    args: argparse.Namespace,
    cluster: LocalCluster,
    network: Namespaces,
    bodies: Sequence[dict[str, Any]],
    role: str,
    way: Way,
) -> tuple[Load, float, float]:
    """(what the clients got, when the node was cut off, seconds from the healing until all are one cluster)"""
    load = Load()
    doors = [cluster[DOOR].url, cluster[OTHER_DOOR].url]
    async with _session(role) as session:
        works = [
            asyncio.create_task(load.client(session, doors, body, f"{role}-{way}", number))
            for number, body in enumerate(bodies)
        ]
        while sum(len(one.tokens) >= args.tokens // 3 for one in load.streams) < len(bodies) / 2:
            await asyncio.sleep(0.005)
            if any(work.done() for work in works):
                break
        victim = FIXED[role] if role in FIXED else await asyncio.to_thread(busiest, cluster, role)
        # While the busiest was asked for, those streams may have ended: what a cut does to streams is its point.
        while not any(0 < len(one.tokens) < args.tokens // 2 for one in load.streams):
            await asyncio.sleep(0.005)
            if any(work.done() for work in works):
                break
        network.cut(victim, way)
        cut_at = time.monotonic()
        await asyncio.sleep(args.cut_s)
        # Requests that come during the cut are the point of it.
        while not any(one.begun > cut_at for one in load.streams):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        network.heal(victim)
        healed_at = time.monotonic()
        await asyncio.to_thread(form, cluster)
        healed_s = time.monotonic() - healed_at
        load.over = True
        await asyncio.gather(*works)
    return load, cut_at, healed_s


if __name__ == "__main__":
    sys.exit(main())
