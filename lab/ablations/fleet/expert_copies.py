"""Copies of experts against losses of ranks: nodes whose GPUs share the experts of a model, under load."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import points, relative
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

MODEL, HARDWARE, RANKS = "Kimi-K2", "32xh20", 32
NODES = 4
"""That compute prompts, and as many that decode."""
COPIES = (1, 2)
EVERY_S = (0.0, 300.0, 60.0)
DOWN_S = 60.0
SPEEDS = (1.5, 2.5)
TTFT_S, TBT_S = 30.0, 0.2


def label(copies: int, every_s: float, speed: float) -> str:
    lost = f"a loss every {every_s:g} s" if every_s else "no loss"
    return f"{copies} {'copy' if copies == 1 else 'copies'}, {lost}, {speed:g} x the load"


def cases(requests: int | None) -> list[Case]:
    count = min(requests or 4000, 4000)
    base = SimConfig(
        model_geometry=MODEL, hardware=HARDWARE, expert_ranks=RANKS, prefill=NODES, decode=NODES, rank_down_s=DOWN_S
    )
    return [
        Case(
            label(copies, every_s, speed),
            replace(base, expert_copies=copies, rank_loss_every_s=every_s),
            Workload("conversation", count, speed),
            TTFT_S,
            TBT_S,
        )
        for speed in SPEEDS
        for every_s in EVERY_S
        for copies in COPIES
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    parts = []
    for speed in SPEEDS:
        for every_s in EVERY_S:
            one, two = (label(copies, every_s, speed) for copies in COPIES)
            lost = f"with a loss every {every_s:g} s" if every_s else "without losses"
            parts.append(
                f"{lost} at {speed:g} times the load effective requests {points(values, 'effective', two, one)}, mean "
                f"TTFT {relative(values, 'mean TTFT, s', two, one)}"
            )
    return (
        f"Two copies of each expert against one: {'; '.join(parts)}. The losses are far more frequent than on real "
        "machines, so that a run of minutes has some; scripts/plan.py expert-failures has rates of hours, by formula."
    )


EXPERT_COPIES = Ablation(
    "expert-copies",
    "Do copies of experts pay when ranks are lost?",
    f"{MODEL} on {NODES}P+{NODES}D of {RANKS} H20 each, conversation trace; experts on {RANKS} ranks of a node "
    f"(lab/simulator/models/expert_ranks.py). Ranks of any node are lost by chance and back after {DOWN_S:g} s. A node "
    "with another copy of everything goes on with the ranks that it has; one without serves nobody until the rank is "
    f"back, and its requests are placed again. Effective = TTFT <= {TTFT_S:g} s and mean TBT <= {1000 * TBT_S:g} ms.",
    cases,
    metrics("effective", "mean TTFT, s", "p99 TTFT, s")
    | {"p99 longest gap, s": metric("longest_gap_s", "p99"), "attempts lost": metric("retries")},
    reading,
)
