"""Ranks with experts that are killed, stopped, cut off and continued under load: who notices, and what it costs.

    python scripts/faults.py ranks           4 ranks; two copies of each expert, then the rules without copies
    python scripts/faults.py ranks --rounds 2 --json out.json

One node serves a tiny mixture of experts with --expert-parallel-size 4. First with --expert-replicas 2: every rank but
the first, in turn, is killed (and started again by the node), then stopped for --stop-s and continued, while clients
stream. No request may fail, and every stream must return exactly the tokens of the undisturbed run; the goal of its
longest pause, 2 s at the 99th percentile, is a row and no check. Then without copies, once for each rule of
--expert-loss, a rank is killed, and stopped and continued. With `wait` the same holds, without that goal. With `drop`
no request fails; those that did without experts say so in usage.dropped_experts, their numbers add up to what the node
counted, and the others return the tokens of the undisturbed run. With `fail` requests may end with an error that names
the rank, and all others return their tokens. Other faults come once every rank is back; no rank may be masked without a
fault, and nothing may stay held.

The other parts are in rank_changes.py. A rank that joins over TCP is cut off: for --stop-s, and until its connection is
given up. Two ranks join a node of two, one is killed, one stopped and continued, and both leave. Two nodes share 4
ranks, each of which is killed and started again, then stopped and continued; then one node is killed. No request may
fail, and every one must return its tokens. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial

from lab.bench.common.results import Row
from lab.faults.checks import GOAL_S, differences
from lab.faults.client import Stream
from lab.faults.rank_changes import Changes, play_added, play_cut, play_shared
from lab.faults.runner import Run, Scenario, Sent, run
from lab.faults.tiny import EXPERTS, tiny_model
from lab.flag_types import above_zero, positive

NODE = "mixed-0"
KILLED, STOPPED = "killed", "stopped"
WAIT, DROP, FAIL = "wait", "drop", "fail"
ALONE = 1
"""The rank that is lost without a copy."""
LEAST_TOKENS = 3
NAMED = f"were lost with rank {ALONE} of"
"""What the error of a request says that needed its experts (engine/model/experts/losses.py)."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--streams", type=positive, default=8, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=120, help="most output tokens of a request")
    parser.add_argument("--prompt-tokens", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=1, help="how often every rank is killed and stopped")
    parser.add_argument("--stop-s", type=above_zero, default=4.0, help="how long a rank is stopped or cut off, seconds")


def check(args: Namespace) -> None:
    """Raises ValueError for a node without a rank to lose, and for answers that are over before a third of them."""
    if args.ranks <= ALONE:
        raise ValueError(f"--ranks {args.ranks}: the first rank is the node itself, so at least {ALONE + 1}")
    if args.tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {args.tokens}: faults come after a third of them, so at least {LEAST_TOKENS}")


def play(this: Run) -> None:
    args = this.args
    model = [*tiny_model(this.folder(), **EXPERTS), "--max-model-len", "4096"]
    here = [*model, "--expert-parallel-size", str(args.ranks)]
    with this.cluster("mixed=1", [*here, "--expert-replicas", "2"]) as cluster:
        changes = Changes.of(this, cluster, NODE)
        for number in range(args.rounds):
            for rank in range(1, args.ranks):
                for fault in (KILLED, STOPPED):
                    case = f"round {number + 1}: rank {rank} {fault}, a copy elsewhere"
                    changes.play(case, _harm(changes, rank, fault), changes.masked_and_back(), GOAL_S)
        changes.masked_at_most("whole run", {NODE: 2 * args.rounds * (args.ranks - 1)})
    for rule in (WAIT, DROP, FAIL):
        with this.cluster("mixed=1", [*here, "--expert-loss", rule]) as cluster:
            changes = Changes.of(this, cluster, NODE)
            for fault in (KILLED, STOPPED):
                case = f"rank {ALONE} {fault}, no copy, {rule}"
                before = changes.experts(NODE)["dropped_pairs"]
                load, began = changes.under_load(case, _harm(changes, ALONE, fault), changes.masked_and_back())
                this.settle(cluster)
                lost = changes.experts(NODE)["dropped_pairs"] - before
                rows, wrong = by_rule(case, rule, changes.calm, load, lost, began)
                this.rows += rows
                this.wrong += wrong
            changes.masked_at_most(rule, {NODE: 2})
    play_cut(this, model)
    play_added(this, model)
    play_shared(this, model)


def _harm(changes: Changes, rank: int, fault: str) -> Callable[[], None]:
    """To be called when the fault is due."""

    def harm() -> None:
        pid = changes.experts(NODE)["processes"][str(rank)]
        if fault == KILLED:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(changes.this.args.stop_s)
        finally:
            os.kill(pid, signal.SIGCONT)

    return harm


def by_rule(
    case: str, rule: str, calm: Sequence[Stream], load: Sent, lost: int, began: float
) -> tuple[list[Row], list[str]]:
    """(rows, what is wrong) after the loss of experts without a copy. `calm`: the undisturbed result of each body;
    `lost`: results of experts that the node did without, as it counts them; `began`: when the fault came, monotonic."""
    failed = [one for one in load.streams if one.error]
    told = [one for one in load.streams if one.dropped_experts]
    whole = [(body, one) for body, one in load.requests if not one.error and not one.dropped_experts]
    different = differences(case, [calm[body] for body, _ in whole], [one for _, one in whole])
    through = sum(one.begun < began < one.at[-1] for _, one in whole if one.at)
    none = {"goal": 0.0}
    rows = [
        Row(case, "requests", "", float(len(load.streams))),
        Row(case, "errors", "", float(len(failed)), limits={} if rule == FAIL else none),
        Row(case, "wrong tokens", "", float(len(different)), limits=none),
        Row(case, "answers that say what they lack", "", float(len(told))),
        Row(case, "whole answers, under way at the fault", "", float(through)),
        Row(case, "results that steps did without", "", float(lost)),
    ]
    wrong = [f"{case}: {one.error}" for one in failed if rule != FAIL or NAMED not in one.error]
    wrong += different
    if not whole:
        wrong.append(f"{case}: no answer is whole, so no tokens were compared")
    if told and rule != DROP:
        wrong.append(f"{case}: {len(told)} answers did without experts")
    if rule == WAIT:
        if not through:
            wrong.append(f"{case}: no whole answer was under way at the fault, so none has waited")
        return rows, wrong + ([f"{case}: {lost} results of experts are missing"] if lost else [])
    if not lost:
        wrong.append(f"{case}: no step did without an expert, so the rule was not tried")
    if rule == FAIL and not failed:
        wrong.append(f"{case}: no request failed, so the rule was not tried")
    said = sum(one.dropped_experts for one in told)
    if rule == DROP and said != lost:
        wrong.append(f"{case}: the answers say that {said} results of experts are missing, the node {lost}")
    return rows, wrong


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        check=check,
        quick={"ranks": 3, "streams": 4, "tokens": 60, "stop_s": 2.0},
    ),
)
