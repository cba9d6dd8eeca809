"""A load that doubles and halves: nodes that start and leave, against fixed numbers of nodes."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import quotient, relative, weighted
from lab.ablations.common.goals import at_least, at_most
from lab.ablations.common.metrics import metric, metrics
from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig

TTFT_S, TBT_S = 30.0, 0.2
PEAK, LOW = (5, 3), (3, 2)
"""Prefill and decode nodes: with the first, the load at its peak keeps its objectives; with the second, the lower one
does."""
MOST = (8, 5)
START_S = 60.0
WANTED = 0.98
"""Share of the peak cluster's effective requests that scaling must keep (issue of this project)."""


def tide(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """Every second request in the first and the last third of the time, every request between."""
    end = max(row.timestamp_ms for row in rows)
    return [row for number, row in enumerate(rows) if number % 2 == 0 or end / 3 <= row.timestamp_ms < 2 * end / 3]


def static(nodes: tuple[int, int]) -> str:
    return f"{nodes[0]}P+{nodes[1]}D"


SCALED = "nodes start and leave"


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", requests, change=tide)
    base = SimConfig(slo=f"standard:ttft={TTFT_S:g},tbt={TBT_S:g}", scale_start_s=START_S)
    bounds = f"prefill=2..{MOST[0]},decode=2..{MOST[1]}"
    made = {static(nodes): replace(base, prefill=nodes[0], decode=nodes[1]) for nodes in (PEAK, LOW)}
    made[SCALED] = replace(base, prefill=LOW[0], decode=LOW[1], autoscale=bounds)
    return [Case(label, config, work, TTFT_S, TBT_S) for label, config in made.items()]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    peak, low = static(PEAK), static(LOW)
    return (
        f"Against {peak}: with nodes that start and leave, effective requests "
        f"{relative(values, 'effective', SCALED, peak)}, node-hours {relative(values, 'node-hours', SCALED, peak)}; "
        f"with {low}, effective requests {relative(values, 'effective', low, peak)}. "
        f"A node is paid from the decision for it on, {START_S:g} s before it is ready."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    scaled, peak = values[SCALED], values[static(PEAK)]
    effective = quotient(scaled["effective"], peak["effective"])
    hours = quotient(scaled["node-hours"], peak["node-hours"])
    text = "load doubles and halves: of the nodes for the peak, the "
    return [
        at_least(
            f"{text}effective requests kept",
            f">= {WANTED:.0%}",
            weighted((100.0, effective)),
            100 * WANTED,
            ".1f",
            " %",
        ),
        at_most(f"{text}node-hours", "< 100 %", weighted((100.0, hours)), 100.0, ".0f", " %"),
    ]


AUTOSCALING = Ablation(
    "autoscaling",
    "What is saved, and what is lost, if nodes start and leave with the load?",
    f"Conversation trace, every second request left out in its first and last third; effective "
    f"= TTFT <= {TTFT_S:g} s and mean TBT <= {1000 * TBT_S:g} ms. Scaling begins with {static(LOW)}, at most "
    f"{static(MOST)}; a node is ready {START_S:g} s after the decision for it.",
    cases,
    metrics("effective", "mean TTFT, s", "p99 TTFT, s") | {"starts and drains": metric("scale_changes")},
    reading,
    goals=goals,
)
