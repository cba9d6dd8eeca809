#!/usr/bin/env python3
"""Restart every node of a local cluster in turn, under load, and count the requests that failed.

  scripts/faults.py rolling-restart --nodes mixed=2,store=1 --requests 500
  scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=2 --tiny --json lab/results/rolling-restart.json
  scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=1 --model /path/to/Llama

The load goes where a balancer would send it: to nodes in turn, none that is known to leave. Each node is drained
(POST /drain), waited for, started again and given work again. A failed request is never sent again; one is enough for
exit code 1. The last node of a role cannot be drained, so there must be two of each.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.common.client import sse_events
from lab.bench.common.results import Row, add_result_flags, quicken, write_result
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import LocalCluster

DRAIN_S = 120.0
KNOWN_S = 20.0  # until every node of a new cluster is known to all


@dataclass
class Load:
    """Streams without end over the nodes of `doors`, `width` at a time."""

    doors: list[str]
    model: str
    width: int
    tokens: int
    ok: int = 0
    failed: list[str] = field(default_factory=list)
    over: bool = False

    async def run(self) -> None:
        numbers = count()
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, numbers) for _ in range(self.width)))

    async def _client(self, session: aiohttp.ClientSession, numbers: Any) -> None:
        while not self.over:
            number = next(numbers)
            url = self.doors[number % len(self.doors)]
            prompt = [5 + (number * 7 + i) % 1000 for i in range(40)]
            body = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True}
            try:
                await self._stream(session, url, body | {"stream": True})
                self.ok += 1
            except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                self.failed.append(f"request {number} at {url}: {type(error).__name__}: {error}")

    async def _stream(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        """Raises ValueError for anything but a whole answer."""
        ended, finish = False, None
        async with session.post(url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {(await response.text())[:300]}")
            async for _, event in sse_events(response.content):
                ended = event is None
                if event and event.get("choices"):
                    finish = event["choices"][0]["finish_reason"]
        if not ended or finish != "length":
            raise ValueError(f"the stream ended by {finish}, {'whole' if ended else 'without its last event'}")


async def drain(url: str) -> None:
    """Ask the node to leave. A cluster that has just come up does not know yet who else could take its work: 409."""
    patience = time.monotonic() + KNOWN_S
    while True:
        try:
            await asyncio.to_thread(rest.post, f"{url}/drain", {"timeout_s": DRAIN_S})
            return
        except rest.RestError as error:
            if ": 409 " not in str(error) or time.monotonic() > patience:
                raise
        await asyncio.sleep(0.2)


async def restart_all(cluster: LocalCluster, load: Load, names: Sequence[str], least: int) -> float:
    """Every node of `names` once, then load until `least` requests have ended. Returns the seconds it took."""
    begun = time.monotonic()
    for name in names:
        node = cluster[name]
        if node.url in load.doors:
            load.doors.remove(node.url)
        node.expected_dead = True
        await drain(node.url)
        await asyncio.to_thread(node.process.wait, DRAIN_S + 30)
        node = await asyncio.to_thread(cluster.restart, name)
        if node.role != "store":
            load.doors.append(node.url)
        print(f"{name} restarted after {time.monotonic() - begun:.1f} s; {load.ok} ok, {len(load.failed)} failed")
    while load.ok + len(load.failed) < least:  # noqa: ASYNC110 - a script's one wait
        await asyncio.sleep(0.05)
    load.over = True
    return time.monotonic() - begun


async def measure(cluster: LocalCluster, model: str, names: Sequence[str], least: int, width: int, tokens: int) -> Load:
    """`model` is its name in the API, `names` the nodes to restart."""
    load = Load([node.url for node in cluster.nodes if node.role != "store"], model, width, tokens)
    running = asyncio.create_task(load.run())
    try:
        seconds = await restart_all(cluster, load, names, least)
    finally:
        load.over = True
        await running
    print(f"{load.ok} requests ok, {len(load.failed)} failed, in {seconds:.1f} s")
    for failure in load.failed[:20]:
        print(f"  {failure}")
    return load


def main(argv: Sequence[str] | None = None) -> int:
    """Other flags go to every node."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="mixed=2,store=1", help="as scripts/up has it")
    parser.add_argument("--requests", type=int, default=500, help="at least so many")
    parser.add_argument("--width", type=int, default=4, help="at a time")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--tiny", action="store_true", help="a small random model, so that many nodes fit")
    add_result_flags(parser)
    args, flags = parser.parse_known_args(argv)
    quicken(args, requests=40)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder)) if args.tiny else []
        given = [*model, *flags, "--served-model-name", "model"]
        with LocalCluster(args.nodes, given, run_dir=Path(folder)) as cluster:
            names = [node.name for node in cluster.nodes]
            load = asyncio.run(measure(cluster, "model", names, args.requests, args.width, args.tokens))
    if args.json is not None:
        rows = [Row("all nodes restarted", "requests that ended well", "requests", load.ok)]
        rows += [Row("all nodes restarted", "requests that failed", "requests", len(load.failed))]
        rows += [Row("all nodes restarted", "nodes", "nodes", len(names))]
        config = {
            "benchmark": "rolling_restart",
            "nodes": args.nodes,
            "tiny": args.tiny,
            "flags": flags,
            "tokens": args.tokens,
        }
        write_result(config | {"width": args.width}, rows, args.json)
    return 1 if load.failed else 0


if __name__ == "__main__":
    sys.exit(main())
