#!/usr/bin/env python3
"""SIGKILL one node of each role under load: no client error, the same tokens, and how long a stream pauses.

    python scripts/faults.py kill-roles                     2 prefill, 2 decode and 2 store nodes with a tiny random
    model
    python scripts/faults.py kill-roles --shape single      one node per role; the one that is killed is started again
    at once
    python scripts/faults.py kill-roles --streams 32 --tokens 400 --json out.json

For each role in turn, streams are started, and once half of them have a third of their tokens the node is killed.
'acceptor' is the node the clients talk to: they reconnect to another one with the request's id and the number of tokens
they have. Every stream must give exactly the tokens it gave before undisturbed, and afterwards every node's books must
be balanced with nothing held. The node then starts again for the next role; with --shape single nothing goes on before
it has, by the same command. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.common.results import Row, add_result_flags, report
from lab.faults.checks import GOAL_S, RESTART_GOAL_S, differences, form, pause_rows, settle
from lab.faults.client import Stream, random_bodies, stream
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster

STREAM_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What runs, who is killed for each role, and whom the clients talk to: (first, after its loss) by role."""

    nodes: str
    victims: dict[str, str]
    doors: dict[str, tuple[str, str]]
    again: bool  # the victim is started again under the streams

    def doors_of(self, role: str) -> tuple[str, str]:
        return self.doors.get(role, self.doors[""])


SHAPES = {
    "pairs": Shape(
        "prefill=2,decode=2,store=2",
        {"decode": "decode-0", "prefill": "prefill-0", "store": "store-0", "acceptor": "store-1"},
        {"": ("store-1", "store-0")},
        again=False,
    ),
    "single": Shape(
        DEFAULT_NODES,
        {"decode": "decode-0", "prefill": "prefill-0", "store": "store-0", "acceptor": "store-0"},
        {"": ("store-0", "prefill-0"), "store": ("prefill-0", "prefill-0")},
        again=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="pairs", help="two nodes per role, or one")
    parser.add_argument("--roles", default="decode,prefill,store,acceptor", help="which to kill, in this order")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.streams, args.tokens = min(args.streams, 6), min(args.tokens, 80)
    print(f"seed {args.seed}")
    bodies = random_bodies(args.streams, args.prompt_tokens, args.tokens, args.seed)
    shape = SHAPES[args.shape]
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*tiny_model(Path(scratch)), "--max-model-len", "4096"]
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        with LocalCluster(shape.nodes, flags, run_dir=run_dir) as cluster:
            model = rest.get(f"{cluster.nodes[0].url}/v1/models")["data"][0]["id"]
            bodies = [body | {"model": model} for body in bodies]
            expected = asyncio.run(_run(cluster, shape, bodies, "calm", args.tokens))[0]
            wrong += [f"undisturbed: {one.error}" for one in expected if one.error]
            for role in args.roles.split(","):
                streams, killed_at = asyncio.run(_run(cluster, shape, bodies, role, args.tokens))
                if shape.again:
                    form(cluster)
                wrong += differences(f"{role} killed", expected, streams) + settle(cluster)
                rows += pause_rows(f"{role} killed", streams, killed_at, RESTART_GOAL_S if shape.again else GOAL_S)
                if not shape.again:
                    cluster.restart(shape.victims[role])
                    form(cluster)
    config = {"nodes": shape.nodes, "streams": args.streams, "tokens": args.tokens, "prompt_tokens": args.prompt_tokens}
    report(config | {"model": "tiny", "seed": args.seed, "wrong": len(wrong)}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


async def _run(
    cluster: LocalCluster, shape: Shape, bodies: Sequence[dict[str, Any]], role: str, tokens: int
) -> tuple[list[Stream], float]:
    """All streams at once; the node of `role`, if it is one, dies when half of them have a third of their tokens, of
    'prefill' when the first has one: the other prompts are being computed. (streams, when it died)"""
    doors, victim = [cluster[door].url for door in shape.doors_of(role)], shape.victims.get(role)
    due, most = (1, 1) if role == "prefill" else (tokens // 3, len(bodies) / 2)
    streams = [Stream() for _ in bodies]
    died = 0.0
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        works = [
            asyncio.create_task(stream(session, doors, body, f"{role}-{number}", one))
            for number, (body, one) in enumerate(zip(bodies, streams, strict=True))
        ]
        while victim is not None and not died and not all(work.done() for work in works):
            await asyncio.sleep(0.005)
            if sum(len(one.tokens) >= due for one in streams) >= most:
                died = time.monotonic()
                (cluster.repeat if shape.again else cluster.kill)(victim)
        await asyncio.gather(*works)
    return streams, died


if __name__ == "__main__":
    sys.exit(main())
