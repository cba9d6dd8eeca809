"""Computes rows and goals from cells, as ratios between contenders of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIB = 1 << 10
BLOCK = 368 * KIB  # the KV block of a small model

Cells = Mapping[tuple[str, str, int, int], dict[str, Any]]
"""(contender, op, size, batch) -> its cell."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`ours` reaches `factor` times the GB/s of `theirs` in every cell of at least `min_size` bytes."""

    ours: str
    theirs: str
    factor: float
    min_size: int = BLOCK
    max_size: int = 1 << 40
    batches: tuple[int, ...] = (1, 32)
    ops: tuple[str, ...] = ("read", "write")


MEMCPY = "memcpy of as many threads"
"""Stands for memcpy, or for memcpy-2 in cells where ours used more than one thread."""

GOALS = (
    Goal("ours-shm", MEMCPY, 0.9),
    Goal("ours-shm", "nixl", 2.0),
    Goal("ours-tcp", "sockets", 0.9),
    Goal("ours-tcp", "mooncake-te", 1.3),
    Goal("ours-tcp", "mooncake-te", 2.0, 4 * KIB, 4 * KIB, (32,)),
    Goal("ours-tcp-key", "ours-tcp", 0.6),
)
TAIL = 3.0  # p99 over p50 at BLOCK


def verdicts(cells: Cells, goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """One row per goal and cell: what, ratio, goal, met. Cells without their contender have no row."""
    rows = []
    for goal in goals:
        for (name, op, size, batch), ours in cells.items():
            against = goal.theirs if goal.theirs != MEMCPY else "memcpy-2" if ours["threads"] > 1 else "memcpy"
            theirs = cells.get((against, op, size, batch))
            wanted = goal.min_size <= size <= goal.max_size and batch in goal.batches and op in goal.ops
            if name == goal.ours and wanted and theirs is not None:
                what = f"{op} {size_text(size)} x{batch}: GB/s of {name} / {against}"
                ratio = ours["gbs"] / theirs["gbs"]
                rows.append({"what": what, "ratio": ratio, "goal": f">= {goal.factor}", "met": ratio >= goal.factor})
    for (name, op, size, batch), ours in cells.items():
        if name.startswith("ours") and size == BLOCK and batch == 1:
            ratio = ours["p99_us"] / ours["p50_us"]
            what = f"{op} {size_text(size)} x{batch}: p99 / p50 of {name}"
            rows.append({"what": what, "ratio": ratio, "goal": f"<= {TAIL}", "met": ratio <= TAIL})
    return rows


@dataclass(frozen=True, slots=True)
class Side:
    """One transport of ours, `name`, and its labels and peers in the rows."""

    name: str
    label: str
    peers: tuple[str, ...]
    limits: tuple[str, ...]


METRICS = {"gbs": "GB/s", "p50_us": "us, p50", "p99_us": "us, p99", "cpu_s_per_gb": "CPU s/GB"}


def result_rows(cells: Cells, sides: Sequence[Side], verbs: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row (lab.bench.common.results) per case of ours and metric. `threads`: the number that each contender kept
    busy, on both ends together. `samples`: the calls of a round, of which its percentiles are. `verbs`: names of the
    operations."""
    found = []
    for side in sides:
        for name, op, size, batch in cells:
            if name != side.name:
                continue
            case = (op, size, batch)
            for field, metric in METRICS.items():
                found.append(
                    {
                        "case": f"{verbs[op]} {size_text(size)} x{batch}, {side.label}",
                        "metric": metric.split(", ")[-1],
                        "unit": metric.split(", ")[0],
                        "ours": cells[name, *case][field],
                        "peers": {
                            peer: cells[peer, *case][field] if (peer, *case) in cells else None for peer in side.peers
                        },
                        "limits": {one: cells[one, *case][field] for one in side.limits if (one, *case) in cells},
                        "threads": {
                            one: cells[one, *case]["threads"]
                            for one in (name, *side.peers, *side.limits)
                            if (one, *case) in cells
                        },
                        "rounds": cells[name, *case]["rounds"],
                        "samples": {
                            one: cells[one, *case]["n_least"]
                            for one in (name, *side.peers, *side.limits)
                            if (one, *case) in cells
                        },
                    }
                )
    return found


def size_text(size: int) -> str:
    return f"{size // KIB}K" if size < 1 << 20 else f"{size >> 20}M"
