"""FAST'25 Fig. 5 (v3 Fig. 8): the scheduler's part of the gain."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, first_requests, ratio
from lab.ablations.common.looks import Copies
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

LABELS = {
    "random": "random",
    "load balancing": "least-load",
    "local cache-aware": "local-cache",
    "Dynamo's cost": "dynamo-cost",
    "llm-d's scorers": "llm-d",
    "Preble's E2": "preble",
    "power of two": "power-of-two",
    "global cache-aware, central": "mooncake-central-greedy",
    "global cache-aware, decentralized": "mooncake",
}

PAPER = {"random": 19.65, "load balancing": 5.27, "local cache-aware": 3.58, "global cache-aware, central": 3.07}
"""Worst first."""

RANKS = (1, 10, 100)


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label,
            SimConfig(placement=name, pool_blocks=6000 if "global" in label else 0),
            first_requests(requests),
            look=(Copies(RANKS),),
        )
        for label, name in LABELS.items()
    ]


def ordered(values: dict[str, dict[str, Estimated]]) -> bool:
    """Whether the paper's four policies have the paper's order."""
    means = [values[name]["mean TTFT, s"].mean for name in PAPER]
    return means == sorted(means, reverse=True)


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    local = ratio(values, "mean TTFT, s", "local cache-aware", "global cache-aware, central")
    regret = ratio(values, "mean TTFT, s", "global cache-aware, decentralized", "global cache-aware, central") - 1
    copies = [values["global cache-aware, decentralized"][f"copies of key {rank}"].mean for rank in RANKS]
    order = "as in the paper" if ordered(values) else "not that of the paper"
    return (
        f"The order of the paper's four is {order}; local over global is {local:.2f} (paper 1.17), and the lack of "
        f"a centre costs {regret:+.1%}. Of the 8 prefill nodes {copies[0]:.0f}, {copies[1]:.0f} and {copies[2]:.0f} "
        "have the 1st, 10th and 100th most wanted block at the end (decentralized; FAST'25 Fig. 11: the hottest are on "
        "nearly all, the 10th on up to 8). Absolute times differ: the Conductor, its threshold and load are not public."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    means = " > ".join(f"{values[name]['mean TTFT, s'].mean:.2f}" for name in PAPER)
    text = "FAST'25 Fig. 5: mean TTFT of " + ", ".join(PAPER)
    return [Goal(text, "in this order", f"{means} s", ordered(values))]


SCHEDULING = Ablation(
    "scheduling",
    "What does the choice of the prefill node gain?",
    "8 prefill and 8 decode nodes, the conversation trace at its own speed; 6,000 blocks (3M tokens) per prefill node; "
    "global policies also have a pool of the same size on every node.",
    cases,
    metrics("mean TTFT, s", "p90 TTFT, s", "hit rate")
    | {f"copies of key {rank}": metric(f"copies_{rank}") for rank in RANKS},
    reading,
    PAPER,
    "FAST'25 Fig. 5, 16 nodes",
    goals,
)
