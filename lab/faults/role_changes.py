#!/usr/bin/env python3
"""Nodes that change between prefill and decode under a load that changes its nature: no request fails, equal tokens.

    python scripts/faults.py role-changes                     two prefill and two decode nodes that change, tiny model
    python scripts/faults.py role-changes --hold-ms 15000 --phase-s 120 --json out.json

Clients send one request after the other: in the first phase long prompts with short answers, in the second short
prompts with long answers, and so on by turns. The same bodies first run on the calm cluster; every later answer must be
the same. Which node does what is read off GET /live twice a second. Afterwards nothing may be held. Exit code 1 if
anything was wrong, or if no node ever changed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.common.results import Row, add_result_flags, report
from lab.faults.checks import differences, settle
from lab.faults.client import Stream, random_bodies, stream
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import LocalCluster

DOOR = "store-0"
BODIES = 24
REQUEST_S = 120.0
LOOK_S = 0.5
SEATS = 8
CALM_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Tide:
    """One kind of load."""

    name: str
    prompt_tokens: int
    output_tokens: int
    clients: int


TIDES = (Tide("prefill", 3000, 4, 64), Tide("decode", 50, 300, 48))


@dataclass(slots=True)
class Seen:
    """What came of one phase."""

    streams: list[Stream] = field(default_factory=list)
    bodies: list[int] = field(default_factory=list)  # which body each stream had
    layouts: list[tuple[float, dict[str, str]]] = field(default_factory=list)  # when, node -> what it does


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="half of them begin with prefill, half with decode")
    parser.add_argument("--hold-ms", type=int, default=1500, help="--role-change-hold-ms of the nodes; 0 = no changes")
    parser.add_argument("--phase-s", type=float, default=12.0)
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.hold_ms, args.phase_s, args.phases = 600, 8.0, 2
    print(f"seed {args.seed}")
    rows, wrong = measure(args)
    config = {name: getattr(args, name) for name in ("nodes", "hold_ms", "phase_s", "phases", "seed")}
    report(config | {"model": "tiny", "wrong": len(wrong)}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


def measure(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """(rows, what was wrong)"""
    rows: list[Row] = []
    names = [f"{role}-{number}" for number in range(args.nodes // 2) for role in ("prefill", "decode")]
    nodes = f"prefill={args.nodes // 2},decode={args.nodes // 2},store=1"
    changing: dict[str, list[str]] = {}
    if args.hold_ms:
        hold = ["--role", "prefill,decode", "--role-change-hold-ms", str(args.hold_ms)]
        changing = {name: [*hold, "--first-role", name.partition("-")[0]] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*tiny_model(Path(scratch)), "--max-model-len", "4096", "--max-num-seqs", str(SEATS)]
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        with LocalCluster(nodes, flags, role_flags=changing, run_dir=run_dir) as cluster:
            model = rest.get(f"{cluster[DOOR].url}/v1/models")["data"][0]["id"]
            loads = [
                [
                    body | {"model": model}
                    for body in random_bodies(BODIES, tide.prompt_tokens, tide.output_tokens, args.seed + number)
                ]
                for number, tide in enumerate(TIDES)
            ]
            calm = [asyncio.run(_calm(cluster, bodies)) for bodies in loads]
            wrong = [f"undisturbed: {one.error}" for streams in calm for one in streams if one.error]
            changes = 0
            for phase in range(args.phases):
                which = phase % len(TIDES)
                seen = asyncio.run(_phase(args, cluster, TIDES[which], loads[which], phase))
                title = f"phase {phase}: {TIDES[which].name}"
                wrong += differences(title, [calm[which][number] for number in seen.bodies], seen.streams)
                changes += (moved := changes_in(seen.layouts))
                rows += phase_rows(title, args.phase_s, seen, moved)
            wrong += settle(cluster)
            if args.hold_ms and not changes:
                wrong.append("no node ever changed its role")
    return rows, wrong


def changes_in(layouts: Sequence[tuple[float, dict[str, str]]]) -> int:
    """How often a node does something else than it did when it was looked at before."""
    pairs = pairwise(layout for _, layout in layouts)
    return sum(before.get(name, does) != does for before, after in pairs for name, does in after.items())


def phase_rows(title: str, seconds: float, seen: Seen, changes: int) -> list[Row]:
    done = [one for one in seen.streams if one.at]
    waits = sorted(one.at[0] - one.begun for one in done)
    middle = waits[len(waits) // 2] if waits else None
    last = seen.layouts[-1][1] if seen.layouts else {}
    return [
        Row(title, "requests", "", float(len(seen.streams)), note=f"{title}: at the end {_said(last)}"),
        Row(title, "output tokens", "1/s", sum(len(one.tokens) for one in done) / seconds),
        Row(title, "first token p50", "s", middle),
        Row(title, "role changes", "", float(changes)),
    ]


def _said(layout: dict[str, str]) -> str:
    return ", ".join(f"{name} {does}" for name, does in sorted(layout.items()))


async def _calm(cluster: LocalCluster, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """Every body once, a few at a time."""
    streams = [Stream() for _ in bodies]
    turns = asyncio.Semaphore(CALM_AT_ONCE)

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        async with turns:
            await stream(session, [cluster[DOOR].url], bodies[number], f"calm-{number}", streams[number])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
        await asyncio.gather(*(one(session, number) for number in range(len(bodies))))
    return streams


async def _phase(
    args: argparse.Namespace, cluster: LocalCluster, tide: Tide, bodies: Sequence[dict[str, Any]], phase: int
) -> Seen:
    """Load for `phase_s`, then until the last answer. Prompts get salts of their own, so that they are computed."""
    seen, url = Seen(), cluster[DOOR].url
    end = time.monotonic() + args.phase_s

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        sent = number
        while time.monotonic() < end:
            one, body = Stream(), sent % len(bodies)
            seen.streams.append(one)
            seen.bodies.append(body)
            salted = bodies[body] | {"cache_salt": f"{phase}-{sent}"}
            await stream(session, [url], salted, f"{phase}-{number}-{sent}", one)
            sent += tide.clients

    async def look(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{url}/live") as answer:
                nodes = (await answer.json())["nodes"]
            does = {node["node_id"]: _does(node) for node in nodes if node.get("load")}
            seen.layouts.append((time.monotonic(), does))
            await asyncio.sleep(LOOK_S)

    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        looking = asyncio.create_task(look(session))
        await asyncio.gather(*(client(session, number) for number in range(tide.clients)))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return seen


def _does(node: dict[str, Any]) -> str:
    return "+".join(role for role in node["load"]["does"] if role != "store")


if __name__ == "__main__":
    sys.exit(main())
