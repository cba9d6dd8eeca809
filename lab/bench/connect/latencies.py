"""Rows and goals of scripts/bench.py connect: times of calls, ours next to those of others. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lab.bench.common.results import Row

P50, P99 = "p50", "p99"


def rows(
    case: str,
    ours: Sequence[float],
    peers: Mapping[str, Sequence[float]],
    limits: Mapping[str, Sequence[float]],
) -> list[Row]:
    """Median and 99th percentile in microseconds of seconds; a peer without values is missing."""
    found = []
    for metric in (P50, P99):
        theirs = {name: at(metric, took) if took else None for name, took in peers.items()}
        most = {name: at(metric, took) for name, took in limits.items()}
        found.append(Row(case, metric, "us", at(metric, ours), theirs, most))
    return found


def at(metric: str, seconds: Sequence[float]) -> float:
    """Microseconds."""
    if metric == P50:
        return round(1e6 * median(seconds), 1)
    return round(1e6 * sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))], 1)


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
