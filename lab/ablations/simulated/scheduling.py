"""FAST'25 Fig. 5 (v3 Fig. 8): the scheduler's part of the gain."""

from __future__ import annotations

import math
from itertools import pairwise

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, first_requests
from lab.ablations.common.evidence import in_order, relative, told
from lab.ablations.common.looks import Copies
from lab.ablations.common.memory import RUNNING, keeping
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
BLOCKS = 6000  # that a node keeps, and those of its share of a pool


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label,
            keeping(SimConfig(placement=name, pool_blocks=BLOCKS if "global" in label else 0), BLOCKS),
            first_requests(requests),
            look=(Copies(RANKS),),
        )
        for label, name in LABELS.items()
    ]


LOCAL, CENTRAL, HERE = "local cache-aware", "global cache-aware, central", "global cache-aware, decentralized"


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    local = relative(values, "mean TTFT, s", LOCAL, CENTRAL)
    lack = relative(values, "mean TTFT, s", HERE, CENTRAL)
    copies = [told(values[HERE][f"copies of key {rank}"], ".1f") for rank in RANKS]
    order = in_order(values, "mean TTFT, s", list(PAPER))
    return (
        f"The order of the paper's four is {order}; local over global {local} (paper +17 %), the lack of a centre "
        f"{lack}. Of the 8 prefill nodes {copies[0]}, {copies[1]} and {copies[2]} have the 1st, 10th and 100th most "
        "wanted block at the end (decentralized; FAST'25 Fig. 11: the hottest are on nearly all, the 10th on up to 8). "
        "Absolute times differ: the Conductor, its threshold and load are not public."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    """With one seed, by the means."""
    means = [values[name]["mean TTFT, s"] for name in PAPER]
    met = {"shown": True, "contradicted": False, "not shown": None}[in_order(values, "mean TTFT, s", list(PAPER))]
    if any(math.isnan(found.half) for found in means):
        met = all(a.mean > b.mean for a, b in pairwise(means))
    text = "FAST'25 Fig. 5: mean TTFT of " + ", ".join(PAPER)
    return [Goal(text, "in this order", " > ".join(told(found, ".2f") for found in means) + " s", met)]


SCHEDULING = Ablation(
    "scheduling",
    "What does the choice of the prefill node gain?",
    f"8 prefill and 8 decode nodes, the conversation trace at its own speed; a prefill node keeps {BLOCKS:,} blocks "
    f"(3M tokens), and every node has memory for {RUNNING:,} more; global policies also have a pool of {BLOCKS:,} "
    "blocks on every node.",
    cases,
    metrics("mean TTFT, s", "p90 TTFT, s", "hit rate")
    | {f"copies of key {rank}": metric(f"copies_{rank}") for rank in RANKS},
    reading,
    PAPER,
    "FAST'25 Fig. 5, 16 nodes",
    goals,
)
