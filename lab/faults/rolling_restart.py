"""Restart every node of a local cluster in turn, under load, and count the requests that failed.

  scripts/faults.py rolling-restart --nodes mixed=2,store=1 --requests 500
  scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=2 --tiny --json lab/results/rolling-restart.json
  scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=1 --model /path/to/Llama

The load is distributed as by a balancer: to nodes in turn, except nodes that are known to leave. Each node is drained
(POST /drain); when it has ended, with exit code 0, it restarts and gets requests again. Clients do not retry failed
requests. A single failure, or one token that differs from an undisturbed run, gives exit code 1. Nodes compute in
float32, so that batches do not change tokens. Other flags go to every node. The last node of a role cannot be drained,
so there must be two nodes of each role.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from lab.bench.common.results import Row
from lab.faults.client import Body, Load
from lab.faults.runner import Run, Scenario, run
from lab.flag_types import positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied

DRAIN_S = 120.0
KNOWN_S = 20.0  # until all nodes of a new cluster know each other
BODIES = 50
PROMPT_TOKENS = 40


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", default="mixed=2,store=1", help="nodes in the format of scripts/up")
    parser.add_argument("--requests", type=positive, default=500, help="minimum number of requests")
    parser.add_argument("--width", type=positive, default=4, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=24, help="tokens of each answer")
    parser.add_argument("--tiny", action="store_true", help="a small random model, so that many nodes fit")


def play(this: Run) -> None:
    args, case = this.args, "all nodes restarted"
    this.facts = {"benchmark": "rolling_restart", "flags": this.node_flags}
    model = this.tiny() if args.tiny else ["--dtype", "float32"]
    with this.cluster(args.nodes, [*model, *this.node_flags]) as cluster:
        names = [node.name for node in cluster.nodes]
        bodies = this.bodies(cluster, BODIES, PROMPT_TOKENS, args.tokens, args.seed)
        door = next(node.name for node in cluster.nodes if node.role != "store")
        calm = this.calm(cluster, door, bodies, args.width)
        load = asyncio.run(restart_all(cluster, bodies, names, args.requests, args.width))
        this.compare(case, cluster, calm, load)
        failed = failures(load)
        this.rows += [
            Row(case, "requests that ended well", "requests", len(load.requests) - len(failed)),
            Row(case, "requests that failed", "requests", len(failed)),
            Row(case, "nodes", "nodes", len(names)),
        ]


def failures(load: Load) -> list[str]:
    """Requests that ended with an error or with an incomplete answer."""
    found = []
    for number, (body, one) in enumerate(load.requests):
        if one.error or len(one.tokens) != load.given[body]["max_tokens"]:
            found.append(f"request {number}: {one.error or f'{len(one.tokens)} tokens'}")
    return found


async def restart_all(
    cluster: LocalCluster, bodies: Sequence[Body], names: Sequence[str], least: int, width: int
) -> Load:
    """Restart every node of `names` once, then continue the load until `least` requests have been sent. Raises NodeDied
    if a node that leaves does not end well."""
    doors = [node.url for node in cluster.nodes if node.role != "store"]
    begun = time.monotonic()
    async with Load(doors, bodies, "rolling", clients=width, salted=True, in_turn=True) as load:
        for name in names:
            node = cluster[name]
            if node.url in doors:
                doors.remove(node.url)
            node.expected_dead = True
            await drain(node.url)
            if await asyncio.to_thread(node.process.wait, DRAIN_S + 30):
                raise NodeDied(cluster.last_words(node))
            node = await asyncio.to_thread(cluster.restart, name)
            if node.role != "store":
                doors.append(node.url)
            print(f"{name} restarted after {time.monotonic() - begun:.1f} s, {len(load.requests)} requests")
        await load.until(lambda: len(load.requests) >= least)
    return load


async def drain(url: str) -> None:
    """Ask the node to leave. It answers 409 while a new cluster does not know yet which nodes could take its work."""
    patience = time.monotonic() + KNOWN_S
    while True:
        try:
            await asyncio.to_thread(rest.post, f"{url}/drain", {"timeout_s": DRAIN_S})
            return
        except rest.RestError as error:
            if error.status != 409 or time.monotonic() > patience:
                raise
        await asyncio.sleep(0.2)


main = partial(run, Scenario(__doc__, add_flags, play, quick={"requests": 40}, passes_flags=True))
