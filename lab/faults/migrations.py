"""Running requests move between decode nodes under load, by drains: no token is lost or doubled, and how long it takes.

    python scripts/faults.py migrations                     200 moves, then the source and the target are killed
    python scripts/faults.py migrations --moves 50 --json out.json

The busiest of three decode nodes leaves (POST /drain) while streams run, so its requests move to the others; it starts
again, and the next one leaves. Every stream must return exactly the tokens of the undisturbed run. The pause of a move
is that of the source's report: from its last step of the request to the seat on the other node. Then, with moves in
progress, the source is killed, and in another round the target. Exit code 1 if a check failed, or if fewer requests
moved.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from lab.bench.common.results import Row
from lab.faults.checks import form, pause_rows
from lab.faults.client import Body, Load
from lab.faults.runner import Run, Scenario, run
from lab.flag_types import positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied

NODES = "prefill=1,decode=3,store=1"
DOOR, DECODES = "store-0", ("decode-0", "decode-1", "decode-2")
DRAIN_S = 60.0
MAX_ROUNDS = 200
BEGUN_TOKENS = 8
"""Of every stream, when a node leaves."""

KILL_AFTER_S = 0.03
"""After the drain has begun: moves are in progress."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--moves", type=positive, default=200, help="minimum number of moved requests")
    parser.add_argument("--streams", type=positive, default=16, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=1200, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=positive, default=300)


def check(args: Namespace) -> None:
    """Raises ValueError for answers that are over before a node leaves."""
    if args.tokens <= BEGUN_TOKENS:
        raise ValueError(f"--tokens {args.tokens}: a node leaves after {BEGUN_TOKENS} of them, so give more")


def moves_of(url: str, request_id: str) -> list[dict[str, Any]]:
    """The moves of one request, events of its timeline on the node that accepted it."""
    timeline = rest.get(f"{url}/debug/requests/{request_id}")
    return [event for event in timeline["events"] if event["event"] == "moved"]


def play(this: Run) -> None:
    args = this.args
    this.facts = {"nodes": NODES}
    with this.cluster(NODES, this.tiny()) as cluster:
        bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, DOOR, bodies)
        moves: list[dict[str, Any]] = []
        for number in range(MAX_ROUNDS):
            if len(moves) >= args.moves:
                break
            name = f"drain-{number}"
            load, leaver, _ = asyncio.run(_drained(cluster, bodies, name, ""))
            this.compare(name, cluster, calm, load)
            moves += [one for turn in range(len(bodies)) for one in moves_of(cluster[DOOR].url, f"{name}-{turn}")]
            cluster.restart(leaver)
            form(cluster)
        if len(moves) < args.moves:
            this.wrong.append(f"{len(moves)} requests moved in {MAX_ROUNDS} rounds")
        this.rows = [*_sums(this.rows), *_pauses(moves)]
        for killed in ("source-killed", "target-killed"):
            load, _, died = asyncio.run(_drained(cluster, bodies, killed, killed.removesuffix("-killed")))
            this.judge(killed, cluster, calm, load)
            this.rows += pause_rows(killed, load.streams, died)
            for name in DECODES:
                if not cluster[name].alive:
                    cluster.restart(name)
            form(cluster)


async def _drained(cluster: LocalCluster, bodies: Sequence[Body], name: str, dies: str) -> tuple[Load, str, float]:
    """All streams run; when they decode, the busiest decode node leaves. dies: "source" = it is killed while its
    requests move, "target" = the least busy one is. Returns (the load, the node that left, when it was asked to).
    Raises NodeDied if that node did not end well, TimeoutError if there is no stream to disturb."""
    async with Load([cluster[DOOR].url], bodies, name, once=True) as load:
        await load.until(lambda: load.with_tokens(BEGUN_TOKENS) == len(bodies))
        by_load = sorted(DECODES, key=lambda node: _running(cluster, node))
        leaver = by_load[-1]
        cluster[leaver].expected_dead = True
        asked = time.monotonic()
        body = {"timeout_s": DRAIN_S, "grace_s": 0.0, "force": True}
        await asyncio.to_thread(rest.post, f"{cluster[leaver].url}/drain", body)
        if dies:
            await asyncio.sleep(KILL_AFTER_S)
            if not load.under_way(int(bodies[0]["max_tokens"]) - 1):
                raise TimeoutError(f"all streams had ended before the {dies} could be killed: raise --tokens")
            cluster.kill(leaver if dies == "source" else by_load[0])
    code = await asyncio.to_thread(cluster[leaver].process.wait, DRAIN_S)
    if code and dies != "source":
        raise NodeDied(cluster.last_words(cluster[leaver]))
    return load, leaver, asked


def _running(cluster: LocalCluster, node: str) -> int:
    return int(rest.get(f"{cluster[node].url}/debug/state")["engine"]["running"])


def _sums(rows: Sequence[Row]) -> list[Row]:
    """One row per check instead of one per round."""
    names = dict.fromkeys(row.metric for row in rows)
    return [
        Row("drains", name, "", sum(float(row.ours or 0.0) for row in rows if row.metric == name), limits=_none(name))
        for name in names
    ]


def _none(name: str) -> dict[str, float]:
    return {} if name == "requests" else {"goal": 0.0}


def _pauses(moves: Sequence[dict[str, Any]]) -> list[Row]:
    pauses = sorted(one["detail"]["pause_s"] for one in moves)
    rows = [Row("drains", "moved requests", "", float(len(moves)))]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = pauses[min(len(pauses) - 1, int(share * len(pauses)))] if pauses else None
        rows.append(Row("drains", f"pause {name}", "s", value))
    return rows


main = partial(run, Scenario(__doc__, add_flags, play, check=check, quick={"moves": 8, "streams": 6, "tokens": 400}))
