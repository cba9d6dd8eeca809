"""Running requests that move between decode nodes, and none that do: bursty loads, by the number of decode nodes."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import Values, points, relative, sign, told
from lab.ablations.common.metrics import metric, metrics
from lab.loads.changes import bursty
from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import PAPER_NODE

PREFILL = 8
DECODE = (12, 16, 20)
KV_TOKENS = 400_000
"""Of a decode node: less than the node of the paper has, so that bursts fill it."""
ANSWERS = 4
"""Answers are this many times as long as recorded, which makes decode the scarce stage."""
TTFT_S, TBT_S = 30.0, 0.1
WAYS = {"none": "none move", "balance": "requests move"}

GAP, STALL, PREEMPTED = "p99 longest gap, ms", "longest gap, s", "preemptions"
COST, GOOD = "cost per million good tokens", "effective"


def bursts(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """In bursts of about 20 s with three times the mean rate, and longer answers."""
    longer = [replace(row, output_length=ANSWERS * row.output_length) for row in rows]
    return bursty(burst=3.0, share=0.2, mean_s=20.0)(longer, seed)


def label(decode: int, way: str) -> str:
    return f"{decode} decode nodes, {WAYS[way]}"


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 2000, 2000), change=bursts)
    model = replace(PAPER_NODE, kv_tokens=KV_TOKENS)
    base = SimConfig(prefill=PREFILL, pool_blocks=6000)
    return [
        Case(label(decode, way), replace(base, decode=decode, migration=way), work, TTFT_S, TBT_S, True, model=model)  # type: ignore[arg-type]
        for decode in DECODE
        for way in WAYS
    ]


def fewest(values: Values) -> str:
    """The fewest decode nodes with moves that are not shown to keep fewer requests than the most without."""
    most = label(DECODE[-1], "none")
    enough = [one for one in DECODE if sign(values, GOOD, label(one, "balance"), most) >= 0]
    if not enough:
        return (
            f"With moves every number of decode nodes keeps fewer effective requests than {DECODE[-1]} without, shown"
        )
    return (
        f"With moves {enough[0]} decode nodes are not shown to keep fewer effective ones than {DECODE[-1]} without; "
        f"their cost per million good tokens: {relative(values, COST, label(enough[0], 'balance'), most)}"
    )


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for decode in DECODE:
        on, off = label(decode, "balance"), label(decode, "none")
        words = [f"{name} {relative(values, name, on, off)}" for name in (GAP, PREEMPTED, "mean TPOT, ms", COST)]
        said.append(f"{decode} decode nodes: {', '.join(words)}, effective requests {points(values, GOOD, on, off)}")
    pause = told(values[label(DECODE[0], "balance")]["p99 pause, ms"], ".2g", " ms")
    return (
        f"Moves against none: {'; '.join(said)}. {fewest(values)}. The p99 of a pause with {DECODE[0]} nodes is "
        f"{pause}. Llumnix's figures are for all of its mechanisms, of which moves for balance and before preemption "
        "are two: priorities and scaling are not in this ablation."
    )


MOVES = Ablation(
    "migration",
    "What do moves of running requests between decode nodes bring under bursts?",
    f"{PREFILL} prefill nodes; conversation trace with answers {ANSWERS} times as long, in bursts of about 20 s with "
    f"three times the mean rate; KV memory of {KV_TOKENS:,} tokens per node. Moves by sched/migration.py: for balance, "
    f"and before a node's blocks run out. Effective = TTFT <= {TTFT_S:g} s and the mean of the longest tenth of the "
    f"gaps <= {1000 * TBT_S:g} ms.",
    cases,
    {GAP: metric("longest_gap_s", "p99", 1000), STALL: metric("longest_gap_s", "max"), PREEMPTED: metric("preemptions")}
    | {"moves": metric("moves"), "p99 pause, ms": metric("move_pause_s", "p99", 1000)}
    | metrics("mean TPOT, ms", "p99 TTFT, s", GOOD),
    reading,
    paper_source="Llumnix (OSDI 2024), abstract: high-priority requests up to 1.5x faster, up to 36 % less cost at a "
    "similar tail latency; no figure of moves alone on this load",
)
