"""Rows and goals of scripts/bench.py connect: times of calls, ours next to those of others. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lab.bench.common.rank import quantile
from lab.bench.common.results import Row

P50, P99 = "p50", "p99"


def rows(
    case: str,
    ours: Sequence[float],
    peers: Mapping[str, Sequence[float]],
    limits: Mapping[str, Sequence[float]],
) -> list[Row]:
    """Median and 99th percentile in microseconds of seconds; a peer without values is missing, and a limit without is
    left out. `samples`: the calls of each."""
    found, taken = [], {"ours": ours, **peers, **limits}
    samples = {name: len(took) for name, took in taken.items() if took}
    for metric in (P50, P99):
        theirs = {name: at(metric, took) if took else None for name, took in peers.items()}
        most = {name: at(metric, took) for name, took in limits.items() if took}
        found.append(Row(case, metric, "us", at(metric, ours), theirs, most, samples=samples))
    return found


def in_turns(
    names: Iterable[str], rounds: int, measure: Callable[[str], Sequence[float]]
) -> dict[str, Sequence[float]]:
    """Seconds of the calls of each contender, over `rounds` rounds in an order that rotates. One that has none in a
    round has none at all: percentiles over fewer rounds are no match for those over all."""
    took: dict[str, list[float]] = {name: [] for name in names}
    lacking: set[str] = set()
    order = list(took)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            found = measure(name)
            took[name] += found
            if not found:
                lacking.add(name)
    return {name: [] if name in lacking else seconds for name, seconds in took.items()}


def at(metric: str, seconds: Sequence[float]) -> float:
    """Microseconds."""
    if metric == P50:
        return round(1e6 * median(seconds), 1)
    return round(1e6 * quantile(seconds, 0.99), 1)


@dataclass(frozen=True, slots=True)
class Goal:
    """In all cases that match, the time of `other` is at least `factor` times ours."""

    cases: str
    metric: str
    other: str
    factor: float


LARGE = r"(368K|8 x 368K|1M|8 x 1M|2\.95M in 30 pieces|16M)"
GOALS = (
    Goal(r"(put|get|write|read) .*, tcp", P50, "upstream", 1.3),
    Goal(r"(put|get) .*, shm", P50, "upstream", 3.0),
    Goal(rf"(write|read) {LARGE}, one host", P50, "memcpy", 0.9),
    Goal(r".*", P99, "upstream", 1.0),
)


def verdicts(found: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per goal and case: what, ratio (the other's time / ours), goal, met."""
    out = []
    for goal in GOALS:
        for row in found:
            other = {**row.peers, **row.limits}.get(goal.other)
            if row.metric == goal.metric and other and row.ours and re.fullmatch(goal.cases, row.case):
                what, ratio = f"{row.case}: {row.metric} of {goal.other} / ours", other / row.ours
                out.append({"what": what, "ratio": ratio, "goal": f">= {goal.factor}", "met": ratio >= goal.factor})
    return out
