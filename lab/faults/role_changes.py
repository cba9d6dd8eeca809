"""Nodes that change between prefill and decode under a load that changes its nature: no request fails, equal tokens.

    python scripts/faults.py role-changes                     two prefill and two decode nodes that change, tiny model
    python scripts/faults.py role-changes --hold-ms 15000 --phase-s 120 --json out.json

Clients send one request after the other, in alternating phases: long prompts with short answers, then short prompts
with long answers. The same bodies first run on the calm cluster; every later answer must be the same. The scenario
reads the nodes' roles from GET /live twice per second. Afterwards no node may hold anything. Exit code 1 if a check
failed, or if no node ever changed.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from lab.bench.common.results import Row
from lab.faults.client import REQUEST_S, Body, Load, Stream
from lab.faults.runner import Run, Scenario, run
from lab.flag_types import above_zero, natural, positive
from lab.launch import rest

DOOR = "store-0"
BODIES = 24
SAMPLE_PERIOD_S = 0.5
SEATS = 8
CALM_CONCURRENCY = 4

Layout = dict[str, str]
"""Node -> its present role."""


@dataclass(frozen=True, slots=True)
class Tide:
    """One kind of load."""

    name: str
    prompt_tokens: int
    output_tokens: int
    clients: int


TIDES = (Tide("prefill", 3000, 4, 64), Tide("decode", 50, 300, 48))


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=positive, default=4, help="half of them start with prefill, half with decode")
    parser.add_argument(
        "--hold-ms", type=natural, default=1500, help="--role-change-hold-ms of the nodes; 0 = no changes"
    )
    parser.add_argument("--phase-s", type=above_zero, default=12.0)
    parser.add_argument("--phases", type=positive, default=3)


def check(args: Namespace) -> None:
    """Raises ValueError unless as many nodes can start with one role as with the other."""
    if args.nodes % 2:
        raise ValueError(f"--nodes {args.nodes}: half of them start with each role, so give an even number")


def play(this: Run) -> None:
    args = this.args
    this.facts = {"model": "tiny"}
    names = [f"{role}-{number}" for number in range(args.nodes // 2) for role in ("prefill", "decode")]
    nodes = f"prefill={args.nodes // 2},decode={args.nodes // 2},store=1"
    changing: dict[str, list[str]] = {}
    if args.hold_ms:
        hold = ["--role", "prefill,decode", "--role-change-hold-ms", str(args.hold_ms)]
        changing = {name: [*hold, "--first-role", name.partition("-")[0]] for name in names}
    with this.cluster(nodes, [*this.tiny(), "--max-num-seqs", str(SEATS)], role_flags=changing) as cluster:
        loads = [
            this.bodies(cluster, BODIES, tide.prompt_tokens, tide.output_tokens, args.seed + number)
            for number, tide in enumerate(TIDES)
        ]
        calm = [this.calm(cluster, DOOR, bodies, CALM_CONCURRENCY) for bodies in loads]
        changes = 0
        for phase in range(args.phases):
            which = phase % len(TIDES)
            title = f"phase {phase}: {TIDES[which].name}"
            load, layouts = asyncio.run(
                _phase(cluster[DOOR].url, TIDES[which], loads[which], f"phase{phase}", args.phase_s)
            )
            this.compare(title, cluster, calm[which], load)
            moved = changes_in(layouts)
            changes += moved
            this.rows += phase_rows(title, args.phase_s, load.streams, layouts[-1] if layouts else {}, moved)
        if args.hold_ms and not changes:
            this.wrong.append("no node ever changed its role")


def changes_in(layouts: Sequence[Layout]) -> int:
    """The number of role changes between successive samples."""
    pairs = pairwise(layouts)
    return sum(before.get(name, does) != does for before, after in pairs for name, does in after.items())


def phase_rows(title: str, seconds: float, streams: Sequence[Stream], last: Layout, changes: int) -> list[Row]:
    done = [one for one in streams if one.at]
    waits = sorted(one.at[0] - one.begun for one in done)
    said = ", ".join(f"{name} {does}" for name, does in sorted(last.items()))
    return [
        Row(
            title,
            "output tokens",
            "1/s",
            sum(len(one.tokens) for one in done) / seconds,
            note=f"{title}: at the end {said}",
        ),
        Row(title, "first token p50", "s", waits[len(waits) // 2] if waits else None),
        Row(title, "role changes", "", float(changes)),
    ]


async def _phase(url: str, tide: Tide, bodies: Sequence[Body], name: str, seconds: float) -> tuple[Load, list[Layout]]:
    """Sends load for `seconds`, then waits for the last answer. Prompts get new salts, so that they are computed."""
    layouts: list[Layout] = []

    async def look() -> None:
        while True:
            nodes = (await asyncio.to_thread(rest.get, f"{url}/live", timeout_s=REQUEST_S))["nodes"]
            layouts.append({node["node_id"]: _does(node) for node in nodes if node.get("load")})
            await asyncio.sleep(SAMPLE_PERIOD_S)

    looking = asyncio.create_task(look())
    async with Load([url], bodies, name, clients=tide.clients, salted=True) as load:
        await asyncio.sleep(seconds)
    looking.cancel()
    with suppress(asyncio.CancelledError):
        await looking
    return load, layouts


def _does(node: dict[str, Any]) -> str:
    return "+".join(role for role in node["load"]["does"] if role != "store")


main = partial(
    run, Scenario(__doc__, add_flags, play, check=check, quick={"hold_ms": 600, "phase_s": 8.0, "phases": 2})
)
