#!/usr/bin/env python3
"""SIGSTOP one node under load for longer than every deadline of the others, SIGCONT, again: nothing stays held.

    python scripts/faults.py stop-nodes                  prefill=1,decode=1,store=1 with the embedded model, about 5
    minutes
    python scripts/faults.py stop-nodes --victims prefill-0,decode-0 --rounds 5 --stop-s 16 --json out.json

Clients at the store node send one request after the other whose prompts are in no cache. In every round the victim is
stopped while prompts are computed, and goes on after --stop-s as if nothing had been. While the only node of a role
stands still new requests may be refused with 503 (they are counted and sent again); a request that has a token must
end with exactly the tokens it gives undisturbed. After every round all nodes are one cluster, every node's books are
balanced, and no block is held. Memory may not grow from round to round. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.common.results import Row, add_result_flags, report
from lab.faults.checks import differences, form, settle
from lab.faults.client import Load, Stream, random_bodies, stream
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster

DOOR = "store-0"
REQUEST_S = 180.0
SPARE = 4  # requests, for those that are left out
GROWTH_BYTES = 48 << 20
"""What a node's resident memory may grow by from the end of the first round to the end of the last."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default=DEFAULT_NODES, help=f"clients talk to {DOOR}")
    parser.add_argument("--model", default="", help="a model, or 'tiny' for a random one; empty = the embedded model")
    parser.add_argument("--victims", default="prefill-0", help="nodes to stop, one per round in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stop-s", type=float, default=16.0, help="how long a node stands still")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.model, args.rounds, args.clients, args.prompt_tokens = "tiny", min(args.rounds, 2), 4, 400
    print(f"seed {args.seed}")
    rows, wrong = measure(args)
    names = ("nodes", "victims", "rounds", "stop_s", "clients", "prompt_tokens", "tokens", "seed")
    config = {name: getattr(args, name) for name in names} | {"model": args.model or "embedded", "dtype": "float32"}
    report(config | {"wrong": len(wrong)}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


def measure(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """(rows, what was wrong)"""
    bodies = random_bodies(args.clients + SPARE, args.prompt_tokens, args.tokens, args.seed)
    rows: list[Row] = []
    memory: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        with LocalCluster(args.nodes, _model_flags(args.model, Path(scratch)), run_dir=run_dir) as cluster:
            url = cluster[DOOR].url
            model = rest.get(f"{url}/v1/models")["data"][0]["id"]
            bodies, calm = asyncio.run(_calm(url, [body | {"model": model} for body in bodies], args.clients))
            wrong = [f"undisturbed: {one.error}" for one in calm if one.error]
            victims = args.victims.split(",")
            for number in range(args.rounds):
                victim = victims[number % len(victims)]
                case = f"round {number + 1}: {victim} stopped"
                load = asyncio.run(_round(args, cluster, victim, bodies, f"round{number}"))
                before = len(wrong)
                wrong += differences(case, [calm[client] for client in load.clients], load.streams)
                failed = len(wrong) - before
                wrong += settle(cluster)
                held = sum(_held(cluster, node.name) for node in cluster.nodes)
                memory.append({node.name: resident(node.pid) for node in cluster.nodes})
                rows += [
                    Row(case, "requests", "", float(len(load.streams))),
                    Row(case, "refused while it stood still", "", float(load.refused)),
                    Row(case, "errors and wrong tokens", "", float(failed), limits={"goal": 0.0}),
                    Row(case, "blocks held afterwards", "", float(held), limits={"goal": 0.0}),
                ]
                print(f"{case}: {len(load.streams)} requests, {len(wrong)} wrong so far", file=sys.stderr)
            rows += [_memory_row(name, memory) for name in memory[0]]
            wrong += [f"{row.case}: {row.metric} is {row.ours} MiB" for row in rows if row.unit == "MiB" and _grew(row)]
            if wrong:
                for node in cluster.nodes:
                    print(f"--- {node.name}", *node.last_lines(30), sep="\n", file=sys.stderr)
    return rows, wrong


def _model_flags(model: str, scratch: Path) -> list[str]:
    if model == "tiny":
        return [*tiny_model(scratch), "--max-model-len", "4096"]
    return ["--dtype", "float32", *(["--model", model] if model else [])]


def _held(cluster: LocalCluster, name: str) -> int:
    engine = rest.get(f"{cluster[name].url}/debug/state")["engine"]
    return 0 if engine is None else int(engine["blocks"]["held"])


def resident(pid: int) -> int:
    """Bytes in memory that are the process's own: arenas, which fill up, are shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


def _memory_row(name: str, memory: Sequence[dict[str, int]]) -> Row:
    growth = (memory[-1][name] - memory[0][name]) / 2**20
    return Row(
        "memory", f"growth of {name} since the first round", "MiB", growth, limits={"most": GROWTH_BYTES / 2**20}
    )


def _grew(row: Row) -> bool:
    return row.ours is not None and row.ours > row.limits["most"]


async def _calm(url: str, bodies: Sequence[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[Stream]]:
    """`count` of the requests and what they give undisturbed. One whose tokens depend on whether others run beside it,
    because two tokens are as likely up to a rounding, shows nothing and is left out."""
    alone, beside = [Stream() for _ in bodies], [Stream() for _ in bodies]
    async with _session() as session:
        for number, (body, one) in enumerate(zip(bodies, alone, strict=True)):
            await stream(session, [url], body | {"cache_salt": "alone"}, f"alone-{number}", one)
        together = [
            stream(session, [url], body | {"cache_salt": "beside"}, f"beside-{number}", one)
            for number, (body, one) in enumerate(zip(bodies, beside, strict=True))
        ]
        await asyncio.gather(*together)
    same = [i for i, one in enumerate(alone) if one.tokens == beside[i].tokens]
    print(f"{len(bodies) - len(same)} of {len(bodies)} requests are tied and left out", file=sys.stderr)
    return [bodies[i] for i in same[:count]], [alone[i] for i in same[:count]]


async def _round(
    args: argparse.Namespace, cluster: LocalCluster, victim: str, bodies: Sequence[dict[str, Any]], name: str
) -> Load:
    load = Load()
    async with _session() as session:
        works = [
            asyncio.create_task(load.client(session, [cluster[DOOR].url], body, name, number, fresh=True))
            for number, body in enumerate(bodies)
        ]
        await asyncio.to_thread(_until_busy, cluster, victim)
        os.kill(cluster[victim].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(args.stop_s)
        finally:
            os.kill(cluster[victim].pid, signal.SIGCONT)
        await asyncio.to_thread(form, cluster)
        sent = len(load.streams)
        deadline = time.monotonic() + REQUEST_S
        # What comes after the stop must work as before it.
        while len(load.streams) < sent + args.clients and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        load.over = True
        await asyncio.gather(*works)
    return load


def _until_busy(cluster: LocalCluster, victim: str) -> None:
    """Until the victim, and the decode nodes for it, hold something for requests."""
    while rest.get(f"{cluster[victim].url}/debug/state")["engine"]["held_for_requests"]["requests"] < 2:
        time.sleep(0.01)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


if __name__ == "__main__":
    sys.exit(main())
