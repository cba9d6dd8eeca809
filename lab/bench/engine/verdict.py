"""Computes lines from cells: one number per metric and server, its share of the floor, its ratio and goal per peer.

Latencies of single requests and batches are the best of the rounds (for each round, the median of its repeats), because
disturbances only add time. Open-loop percentiles are over the requests of all rounds. A server that lacks a round of a
case has no value there: the best of one round is no match for the best of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.bench.common.results import columns
from lab.bench.engine.cases import Case
from lab.bench.engine.cells import Cell, Cells
from lab.bench.engine.floors import Ceilings, Work, floor_ms


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; times in ms, None = not measured."""

    case: str
    metric: str
    ours: float | None
    floor: float
    peers: dict[str, float | None]
    goals: Mapping[str, float]  # peer -> maximum of ours / theirs
    rounds: dict[str, list[float]] = field(default_factory=dict)  # server -> value of each round
    samples: dict[str, int] = field(default_factory=dict)  # server -> values behind a percentile

    @property
    def share(self) -> float | None:
        """Floor / ours; 1 = the floor is reached."""
        return self.floor / self.ours if self.ours else None

    def ratio(self, peer: str) -> float | None:
        theirs = self.peers.get(peer)
        return self.ours / theirs if self.ours is not None and theirs else None

    def verdict(self, peer: str) -> str:
        """'met', 'short', or '' without a goal or a value to compare with."""
        ratio, goal = self.ratio(peer), self.goals.get(peer)
        if goal is None or ratio is None:
            return ""
        return "met" if ratio <= goal else "short"

    def as_row(self) -> dict[str, Any]:
        """lab.bench.common.results.Row with the fields that this benchmark adds."""
        return {
            "case": self.case,
            "metric": self.metric,
            "unit": "ms",
            "ours": self.ours,
            "peers": self.peers,
            "limits": {"floor": self.floor},
            "note": "",
            "goals": {peer: {"ratio": goal, "verdict": self.verdict(peer)} for peer, goal in self.goals.items()},
            "rounds": self.rounds,
            "samples": self.samples,
        }


def goals_of(case: Case, metric: str) -> dict[str, float]:
    """peer -> the most that ours may be of theirs."""
    if case.section == "decode":
        return {"llama": 1.0 if case.count == 1 else 0.5, "vllm": {1: 0.45, 8: 0.5}.get(case.count, 0.6)}
    if case.section == "prefill":
        return {"llama": 0.7, "vllm": 0.6 if case.prompt_len < 2048 else 0.75}
    if case.section == "prefix":
        return {"vllm": 0.5} if metric == "TTFT second" else {}
    return {"TTFT p99": {"vllm": 0.6}, "TPOT p99": {"vllm": 0.5}}.get(metric, {})


def values(case: Case, cells: Sequence[Cell], rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """(metric -> value, metric -> value of each round) of one server; nothing if a round failed or is missing."""
    if [cell.round for cell in cells] != list(range(rounds)) or any(cell.error is not None for cell in cells):
        return {}, {}
    best, by_round = {}, {}
    for metric in case.metrics:
        found = [cell.samples[metric] for cell in cells]
        if case.section == "open-loop":
            pooled = [value for samples in found for value in samples]
            for q in (50, 99):
                best[f"{metric} p{q}"] = float(np.percentile(pooled, q))
                by_round[f"{metric} p{q}"] = [float(np.percentile(samples, q)) for samples in found]
        else:
            by_round[metric] = [float(np.median(samples)) for samples in found]
            best[metric] = min(by_round[metric])
    return best, by_round


def lines(
    listed: Sequence[Case],
    cells: Cells,
    ours: str,
    peers: Sequence[str],
    rounds: int,
    work: Work,
    ceilings: Ceilings,
) -> list[Line]:
    """`rounds`: of each case on each server; others that an interrupted run has left do not count."""
    found = []
    for case in listed:
        kept = {name: cells.of(name, case.name, rounds) for name in (ours, *peers)}
        measured = {name: values(case, each, rounds) for name, each in kept.items()}
        percentiles = (" p50", " p99") if case.section == "open-loop" else ("",)
        for metric in [metric + percentile for metric in case.metrics for percentile in percentiles]:
            each_round = {name: by_round[metric] for name, (_, by_round) in measured.items() if metric in by_round}
            drawn = metric.split()[0] if percentiles[0] else ""
            samples = {name: sum(len(cell.samples[drawn]) for cell in kept[name]) for name in each_round if drawn}
            found.append(
                Line(
                    case.name,
                    metric,
                    measured[ours][0].get(metric),
                    floor_ms(case, metric, work, ceilings),
                    {name: measured[name][0].get(metric) for name in peers},
                    goals_of(case, metric),
                    each_round,
                    samples,
                )
            )
    return found


def table(found: Sequence[Line], peers: Sequence[str], errors: Mapping[str, str]) -> str:
    """Columns: case, metric, ours, floor, share of the floor, each peer with ratio, goal and verdict. Times in ms."""
    head = ["case", "metric", "ours ms", "floor ms", "share"]
    for name in peers:
        head += [name, "ratio", "goal"]
    rows = [head]
    for line in found:
        row = [line.case, line.metric, _ms(line.ours), _ms(line.floor), _percent(line.share)]
        for name in peers:
            goal = line.goals.get(name)
            row += [_ms(line.peers.get(name)), _times(line.ratio(name))]
            row.append("" if goal is None else f"<= {goal:.2f}x {line.verdict(name)}".rstrip())
        rows.append(row)
    return "\n".join([columns(rows, range(2)), *(f"note: {what}: {why}" for what, why in errors.items())])


def _ms(value: float | None) -> str:
    return "missing" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
