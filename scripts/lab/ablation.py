"""What an ablation is: a question, simulated cases, what the paper says, and one sentence about the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scripts.lab.generate import chats
from scripts.lab.traces import find_trace
from sim.cluster import Cluster
from sim.config import SimConfig
from sim.result import figures
from sim.trace import TraceRow, jittered, read_trace

T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t for 95 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of a released trace, or of a generator where it is not at hand (the result says which)."""

    trace: str = "conversation"
    requests: int | None = None
    speed: float = 1.0
    jitter_s: float = 3.0
    change: Callable[[list[TraceRow], int], list[TraceRow]] | None = None  # (rows, seed) -> rows


@dataclass(frozen=True, slots=True)
class Case:
    """One bar or point: `label` names it, `series` and `x` place it in a plot."""

    label: str
    config: SimConfig
    workload: Workload = Workload()
    ttft_slo_s: float | None = 30.0  # FAST'25's effective request
    tbt_slo_s: float | None = 0.2
    series: str = ""
    x: float | None = None


@dataclass(frozen=True, slots=True)
class Estimated:
    """Mean over seeds, and half of the 95 % confidence interval (NaN for one seed)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.half) else f"{self.mean:.4g} ±{self.half:.2g}"


Metric = Callable[[dict[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Ablation:
    """`paper`: by case label, the value of the first metric there; `reading`: what the numbers say, from them."""

    name: str
    question: str
    definition: str
    cases: Callable[[int | None], list[Case]]  # requests at most -> cases
    metrics: dict[str, Metric]
    reading: Callable[[dict[str, dict[str, Estimated]]], str]
    paper: dict[str, float] = field(default_factory=dict)
    paper_source: str = ""


def metric(name: str, part: str | None = None, scale: float = 1.0) -> Metric:
    """A figure of sim.result, NaN where there is none."""

    def of(result: dict[str, Any]) -> float:
        value = result[name]
        if value is not None and part is not None:
            value = value[part]
        return math.nan if value is None else scale * float(value)

    return of


@dataclass(slots=True)
class Outcome:
    """Everything about one ablation's run."""

    ablation: Ablation
    cases: list[Case]
    values: dict[str, dict[str, Estimated]]  # label -> metric -> value
    raw: dict[str, list[dict[str, Any]]]  # label -> figures by seed
    source: str  # where the requests came from


def run(ablation: Ablation, requests: int | None, seeds: int, workers: int, done: Callable[[], None]) -> Outcome:
    """Every case with seeds 0..seeds-1; `done` is called after each run. Raises ValueError for labels that repeat."""
    cases = ablation.cases(requests)
    if len({case.label for case in cases}) < len(cases):
        raise ValueError(f"{ablation.name}: labels repeat")
    work = [(case, seed) for case in cases for seed in range(seeds)]
    raw: dict[str, list[dict[str, Any]]] = {case.label: [] for case in cases}
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            futures = [pool.submit(simulate, case, seed) for case, seed in work]
            for (case, _), future in zip(work, futures, strict=True):
                raw[case.label].append(future.result())
                done()
    else:
        for case, seed in work:
            raw[case.label].append(simulate(case, seed))
            done()
    values = {
        label: {name: estimated([of(result) for result in results]) for name, of in ablation.metrics.items()}
        for label, results in raw.items()
    }
    return Outcome(ablation, cases, values, raw, rows_of(cases[0].workload.trace)[0])


def simulate(case: Case, seed: int) -> dict[str, Any]:
    """Figures of one case under one seed."""
    work = case.workload
    rows = rows_of(work.trace)[1][: work.requests]
    if work.change is not None:
        rows = work.change(rows, seed)
    rows = jittered(rows, work.jitter_s, seed)
    cluster = Cluster(replace(case.config, seed=seed))
    for _ in cluster.run([replace(row, timestamp_ms=row.timestamp_ms / work.speed) for row in rows]):
        pass
    return figures(cluster, case.ttft_slo_s, case.tbt_slo_s)


@lru_cache(maxsize=4)
def rows_of(trace: str) -> tuple[str, list[TraceRow]]:
    """(where they are from, rows)"""
    path = find_trace(trace)
    if path is None:
        return f"generated chats in place of the {trace} trace", chats(0, 4000).rows
    return path.name, list(read_trace(Path(path)))


def estimated(values: Sequence[float]) -> Estimated:
    mean = fmean(values)
    if len(values) < 2:
        return Estimated(mean, math.nan)
    return Estimated(mean, T95.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values)))


def ratio(values: dict[str, dict[str, Estimated]], name: str, over: str, under: str) -> float:
    """How many times the metric of `under` that of `over` is; NaN by zero."""
    below = values[under][name].mean
    return values[over][name].mean / below if below else math.nan


first_requests = partial(Workload, "conversation")
"""The conversation trace up to a number of requests."""
