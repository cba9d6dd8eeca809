"""Ranks with experts on busy cores for a given time, without a fault: no rank may be masked.

    python scripts/faults.py ranks-soak                  an hour: 4 ranks, clients, and a busy process per core
    python scripts/faults.py ranks-soak --soak-s 60 --busy 4

One node serves a tiny mixture of experts with --expert-parallel-size 4, without copies, so that one wrong decision
would fail requests. Clients stream one request after the other, and --busy processes only compute. At the end no rank
has been masked, no request has failed, and every one has returned the tokens of the calm node; the node has not grown
since the first minute, or the first quarter of a shorter run, and nothing is held. Exit code 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from lab.bench.common.results import Row
from lab.bench.estimates import spinning
from lab.faults.checks import Memory, blocks_held, differences, growth_row
from lab.faults.client import Body, Load
from lab.faults.rank_changes import Changes
from lab.faults.ranks import check
from lab.faults.runner import Run, Scenario, run
from lab.faults.tiny import EXPERTS, tiny_model
from lab.flag_types import above_zero, natural, positive

PART_S = 60.0
"""The load is judged in parts of this length, so that the tokens of an hour need not be kept; four if it is short."""

SMALL = ("--kv-cache-bytes", "32M", "--dram-bytes", "32M")
"""The arena and the share of the pool fill in the first minute. By default they have 260,000 blocks of this tiny model,
whose names take 150 MiB: that looked like a leak for an hour."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--soak-s", type=above_zero, default=3600.0, help="seconds under load (default %(default)s)")
    parser.add_argument(
        "--busy", type=natural, default=os.cpu_count() or 1, help="processes that only compute (default: one per core)"
    )
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--streams", type=positive, default=8, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=120, help="most output tokens of a request")
    parser.add_argument("--prompt-tokens", type=positive, default=200)


def play(this: Run) -> None:
    args = this.args
    flags = ["--max-model-len", "4096", *SMALL, "--expert-parallel-size", str(args.ranks)]
    with this.cluster("mixed=1", [*tiny_model(this.folder(), **EXPERTS), *flags]) as cluster:
        node = cluster.nodes[0]
        changes = Changes.of(this, cluster, node.name)
        requests = failed = different = 0
        part_s = min(PART_S, args.soak_s / 4)
        with spinning(args.busy):
            begun = time.monotonic()
            while (left := args.soak_s - (time.monotonic() - begun)) > 0:
                load = asyncio.run(_part(node.url, changes.bodies, f"soak-{requests}", min(left, part_s)))
                found = differences("soak", [changes.calm[body] for body, _ in load.requests], load.streams)
                requests += len(load.requests)
                failed += (errors := sum(bool(one.error) for one in load.streams))
                different += len(found) - errors
                this.wrong += found
                if len(load.requests) == requests:
                    this.memory = Memory()
                    this.memory.growth(cluster)
                print(f"{time.monotonic() - begun:.0f} s: {requests} requests", file=sys.stderr)
        this.settle(cluster)
        pairs = changes.experts(node.name)["pairs_by_rank"]
        grown, wrong = growth_row("soak", this.memory.growth(cluster))
        none = {"goal": 0.0}
        this.rows += [
            Row("soak", "requests", "", float(requests)),
            Row("soak", "errors", "", float(failed), limits=none),
            Row("soak", "wrong tokens", "", float(different), limits=none),
            Row("soak", "blocks held afterwards", "", float(blocks_held(cluster)), limits=none),
            grown,
        ]
        this.wrong += wrong
        this.wrong += [f"rank {rank} computed nothing" for rank, count in enumerate(pairs) if not count]
        changes.masked_at_most("soak", {node.name: 0})


async def _part(url: str, bodies: Sequence[Body], name: str, seconds: float) -> Load:
    """Clients for this time, and until their requests have ended."""
    async with Load([url], bodies, name, salted=True, in_turn=True) as load:
        await asyncio.sleep(seconds)
    return load


main = partial(run, Scenario(__doc__, add_flags, play, check=check, quick={"soak_s": 15.0, "streams": 4, "tokens": 60}))
