"""Ranks with experts that are killed, stopped and continued under load: who notices, and what it costs.

    python scripts/faults.py ranks           4 ranks; two copies of each expert, then the rules without copies
    python scripts/faults.py ranks --rounds 2 --json out.json

One node serves a tiny mixture of experts with --expert-parallel-size 4. First with --expert-replicas 2: every rank but
the first, in turn, is killed (and started again by the node), then stopped for --stop-s and continued, while clients
stream. No request may fail, every stream must return exactly the tokens of the undisturbed run, and its longest pause
may be 2 s at the 99th percentile. Then without copies, once for each rule of --expert-loss: with `wait` the same holds
except for the pause; with `drop` no request fails, and the answers that did without experts say so; with `fail`
requests may end with an error that names the rank, and all others return the tokens of the undisturbed run. After every
fault the rank comes back, no rank was masked without a fault, and nothing stays held.

Then two ranks join a node of two, one is killed, one stopped and continued, and both leave (rank_changes.py). At last
two nodes share two ranks: a rank is killed and started again, one is stopped and continued, and one node is killed. No
request may fail, and every one must return its tokens. Exit code 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from typing import Any

from lab.bench.common.results import Row
from lab.faults.checks import pause_rows
from lab.faults.client import Body, Load
from lab.faults.rank_changes import play_added, play_shared
from lab.faults.runner import Run, Scenario, run
from lab.faults.tiny import EXPERTS, tiny_model
from lab.flag_types import above_zero, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

NODE = "mixed-0"
BACK_S = 60.0
KILLED, STOPPED = "killed", "stopped"


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--streams", type=positive, default=8, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=120, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=1, help="how often every rank is killed and stopped")
    parser.add_argument("--stop-s", type=above_zero, default=4.0, help="how long a rank is stopped, seconds")


def play(this: Run) -> None:
    args = this.args
    model = [*tiny_model(this.folder(), **EXPERTS), "--max-model-len", "4096"]
    model += ["--expert-parallel-size", str(args.ranks)]
    with this.cluster("mixed=1", [*model, "--expert-replicas", "2"]) as cluster:
        bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, NODE, bodies)
        for number in range(args.rounds):
            for rank in range(1, args.ranks):
                for fault in (KILLED, STOPPED):
                    case = f"round {number + 1}: rank {rank} {fault}, a copy elsewhere"
                    load, began = asyncio.run(_broken(this, cluster, bodies, rank, fault, case))
                    this.judge(case, cluster, calm, load)
                    this.rows += pause_rows(case, load.streams, began, 2.0)
        _no_false_masks(this, cluster, 2 * args.rounds * (args.ranks - 1))
    for rule in ("wait", "drop", "fail"):
        with this.cluster("mixed=1", [*model, "--expert-loss", rule]) as cluster:
            bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
            calm = this.calm(cluster, NODE, bodies)
            case = f"rank 1 killed, no copy, {rule}"
            load, _ = asyncio.run(_broken(this, cluster, bodies, 1, KILLED, case))
            experts = _experts(cluster)
            dropped = float(experts["dropped_pairs"])
            this.rows.append(Row(case, "results that steps did without", "", dropped))
            if rule == "wait":
                this.judge(case, cluster, calm, load)
                this.wrong += [f"{case}: {dropped:g} results of experts are missing"] if dropped else []
                continue
            failed = [one for _, one in load.requests if one.error]
            this.rows.append(Row(case, "errors", "", float(len(failed))))
            this.wrong += [f"{case}: {one.error}" for one in failed if rule == "drop" or "lost" not in one.error]
            if not dropped:
                this.wrong.append(f"{case}: no step did without an expert, so the rule was not tried")
            if rule == "fail":
                whole = [(body, one) for body, one in load.requests if not one.error]
                different = sum(one.tokens != calm[body].tokens for body, one in whole)
                this.wrong += [f"{case}: {different} streams without an error have other tokens"] if different else []
            _no_false_masks(this, cluster, 1)
    play_added(this, model)
    play_shared(this, model)


async def _broken(
    this: Run, cluster: LocalCluster, bodies: Sequence[Body], rank: int, fault: str, name: str
) -> tuple[Load, float]:
    """All streams together; the fault comes when half of them have a third of their tokens. Returns when."""
    args = this.args
    async with Load([cluster[NODE].url], bodies, name, once=True, salted=True) as load:
        await load.until(lambda: load.with_tokens(args.tokens // 3) >= len(bodies) / 2)
        pid = (await asyncio.to_thread(_experts, cluster))["processes"][str(rank)]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL if fault == KILLED else signal.SIGSTOP)
        if fault == STOPPED:
            try:
                await asyncio.sleep(args.stop_s)
            finally:
                os.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(_back, this, cluster, name)
    return load, began


def _back(this: Run, cluster: LocalCluster, case: str) -> None:
    """Until no rank is masked."""
    deadline = time.monotonic() + BACK_S
    while rest.get(f"{cluster[NODE].url}/health").get("masked_ranks"):
        if time.monotonic() > deadline:
            this.wrong.append(f"{case}: not back in {BACK_S:g} s: {_experts(cluster)['masked']}")
            return
        time.sleep(0.2)


def _no_false_masks(this: Run, cluster: LocalCluster, faults: int) -> None:
    masked = _experts(cluster)["times_masked"]
    this.rows.append(Row("whole run", "ranks masked", "", float(masked), limits={"goal": float(faults)}))
    if masked > faults:
        this.wrong.append(f"ranks were masked {masked} times for {faults} faults")


def _experts(cluster: LocalCluster) -> dict[str, Any]:
    found: dict[str, Any] = rest.get(f"{cluster[NODE].url}/debug/state")["engine"]["experts"]
    return found


main = partial(run, Scenario(__doc__, add_flags, play, quick={"ranks": 3, "streams": 4, "tokens": 60, "stop_s": 2.0}))
