#!/usr/bin/env python3
"""SIGKILL one node of each role under load: no client error, the same tokens, and how long a stream pauses.

    python scripts/kill_roles.py                     2 prefill, 2 decode and 2 store nodes with a tiny random model
    python scripts/kill_roles.py --streams 32 --tokens 400 --json out.json

For each role in turn, streams are started, and once half of them have a third of their tokens the node is killed.
'acceptor' is the node the clients talk to: they reconnect to another one with the request's id and the number of tokens
they have. Every stream must give exactly the tokens it gave before undisturbed, and afterwards every node's books must
be balanced with nothing held. The node then starts again for the next role. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import rest
from scripts.benchlib.results import Row, add_result_flags, report
from scripts.cluster import LocalCluster
from scripts.faultbench.client import Stream, stream
from scripts.faultbench.tiny import tiny_model

NODES = "prefill=2,decode=2,store=2"
DOOR, OTHER_DOOR = "store-1", "store-0"
VICTIMS = {"decode": "decode-0", "prefill": "prefill-0", "store": "store-0", "acceptor": DOOR}
SETTLE_S = 30.0
STREAM_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--roles", default=",".join(VICTIMS), help="which to kill, in this order")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.streams, args.tokens = min(args.streams, 6), min(args.tokens, 80)
    rng = random.Random(args.seed)
    print(f"seed {args.seed}")
    bodies = [_body(args, rng, number) for number in range(args.streams)]
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*tiny_model(Path(scratch)), "--max-model-len", "4096"]
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        with LocalCluster(NODES, flags, run_dir=run_dir) as cluster:
            model = rest.get(f"{cluster[DOOR].url}/v1/models")["data"][0]["id"]
            bodies = [body | {"model": model} for body in bodies]
            expected = asyncio.run(_run(cluster, bodies, "calm", None, args.tokens))[0]
            wrong += [f"undisturbed: {one.error}" for one in expected if one.error]
            for role in args.roles.split(","):
                streams, killed_at = asyncio.run(_run(cluster, bodies, role, VICTIMS[role], args.tokens))
                wrong += _differences(role, expected, streams) + settle(cluster)
                rows += _rows(role, streams, killed_at)
                cluster.restart(VICTIMS[role])
                _wait(cluster)
    config = {"nodes": NODES, "streams": args.streams, "tokens": args.tokens, "prompt_tokens": args.prompt_tokens}
    report(config | {"model": "tiny", "seed": args.seed, "wrong": len(wrong)}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _body(args: argparse.Namespace, rng: random.Random, number: int) -> dict[str, Any]:
    prompt = [rng.randrange(3, 40_000) for _ in range(args.prompt_tokens)]
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True} | sampled


async def _run(
    cluster: LocalCluster, bodies: Sequence[dict[str, Any]], name: str, victim: str | None, tokens: int
) -> tuple[list[Stream], float]:
    """All streams at once; the victim dies when half of them have a third of their tokens. (streams, when it died)"""
    doors = [cluster[DOOR].url, cluster[OTHER_DOOR].url]
    streams = [Stream() for _ in bodies]
    died = 0.0
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        works = [
            asyncio.create_task(stream(session, doors, body, f"{name}-{number}", one))
            for number, (body, one) in enumerate(zip(bodies, streams, strict=True))
        ]
        while victim is not None and not died and not all(work.done() for work in works):
            await asyncio.sleep(0.005)
            if sum(len(one.tokens) >= tokens // 3 for one in streams) >= len(streams) / 2:
                cluster.kill(victim)
                died = time.monotonic()
        await asyncio.gather(*works)
    return streams, died


def _differences(role: str, expected: Sequence[Stream], streams: Sequence[Stream]) -> list[str]:
    found = []
    for number, (calm, disturbed) in enumerate(zip(expected, streams, strict=True)):
        if disturbed.error:
            found.append(f"{role} killed: stream {number} failed: {disturbed.error}")
        elif disturbed.tokens != calm.tokens:
            same = next((i for i, (a, b) in enumerate(zip(calm.tokens, disturbed.tokens, strict=False)) if a != b), -1)
            found.append(
                f"{role} killed: stream {number} differs from token {same} on ({len(disturbed.tokens)} tokens)"
            )
    return found


def settle(cluster: LocalCluster) -> list[str]:
    """Wait until no living node holds anything for a request; what is wrong if that does not come."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        wrong = [text for node in cluster.nodes if node.alive for text in _held(node.name, node.url)]
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(0.2)


def _held(name: str, url: str) -> list[str]:
    engine = rest.get(f"{url}/debug/state")["engine"]
    if engine is None:
        return []
    books = [] if engine["integrity"] is None else [f"{name}: {engine['integrity']}"]
    held = {**engine["references"], **engine["held_for_requests"], "blocks": engine["blocks"]["held"]}
    return books + [f"{name} still holds {count} {what}" for what, count in held.items() if count]


def _rows(role: str, streams: Sequence[Stream], died: float) -> list[Row]:
    """Pauses of all streams that still had tokens to come."""
    gaps = sorted(one.longest_gap(died) for one in streams if one.at and one.at[-1] > died)
    case = f"{role} killed"
    rows = [Row(case, "streams cut", "", float(len(gaps))), Row(case, "reconnects", "", _total(streams))]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else None
        rows.append(Row(case, f"longest pause {name}", "s", value, limits={"goal": 2.0} if name == "p99" else {}))
    return rows


def _total(streams: Sequence[Stream]) -> float:
    return float(sum(one.reconnects for one in streams))


def _wait(cluster: LocalCluster) -> None:
    """Until the node that was started again is a member everywhere."""
    deadline = time.monotonic() + 60
    while not (all(node.ready for node in cluster.nodes if node.alive) and cluster.formed()):
        cluster.check()
        if time.monotonic() > deadline:
            raise TimeoutError("the node that was started again did not join")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
