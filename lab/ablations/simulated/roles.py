"""Nodes that change their role when the kind of load changes: the gain over a fixed split."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import best_of, points, told
from lab.ablations.common.metrics import metric, metrics
from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig

TIDE_S = 600.0
OUTPUT = 12
SPEED = 1.5
SPLITS = (5, 8, 11)


def tides(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """Alternates: as recorded, which is nearly all prefill, and with a quarter of the input and OUTPUT times the
    output."""
    made = []
    for row in rows:
        if int(row.timestamp_ms / 1000 / SPEED // TIDE_S) % 2 == 0:
            made.append(row)
            continue
        blocks = row.hash_ids[: -(-len(row.hash_ids) // 4)]
        tokens = min(max(1, row.input_length // 4), 512 * len(blocks))
        made.append(replace(row, input_length=tokens, output_length=OUTPUT * row.output_length, hash_ids=blocks))
    return made


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 6000, 6000), SPEED, change=tides)
    base = SimConfig(pool_blocks=6000)
    made = [
        Case(f"{count}P+{16 - count}D", replace(base, prefill=count, decode=16 - count), work, 10.0, 0.1)
        for count in SPLITS
    ]
    made += [
        Case(
            f"{count}P+{16 - count}D that change",
            replace(base, prefill=count, decode=16 - count, role_changes=True),
            work,
            10.0,
            0.1,
        )
        for count in SPLITS
    ]
    mixed = replace(base, prefill=0, decode=0, mixed=16, chunk_tokens=512)
    return [
        *made,
        Case("16 mixed", mixed, work, 10.0, 0.1),
        Case("16 mixed that change", replace(mixed, role_changes=True), work, 10.0, 0.1),
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    fixed = [*(f"{count}P+{16 - count}D" for count in SPLITS), "16 mixed"]
    said = "; ".join(
        f"{name} {told(values[name]['effective'], '.1%')}, {points(values, 'effective', f'{name} that change', name)}"
        for name in fixed
    )
    best = best_of(values, "effective", {name: name for name in values})
    return (
        f"Effective requests, and the gain of the same nodes if they change: {said}; {best}. The paper changes roles "
        "only on large shifts of load and prints no figure; these shifts are extreme, and a change takes no time."
    )


ROLES = Ablation(
    "roles",
    "What is gained if nodes change between prefill and decode?",
    f"16 nodes, conversation trace {SPEED:g} times as fast, its nature changing every {TIDE_S:g} s: as recorded, then "
    f"a quarter of the input and {OUTPUT} times the output; effective = TTFT <= 10 s and mean TBT <= 100 ms.",
    cases,
    metrics("effective", "mean TTFT, s", "p99 TTFT, s", "p99 longest gap, ms") | {"changes": metric("role_changes")},
    reading,
)
