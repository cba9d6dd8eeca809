"""v3 Table 1 under timing: the effect of an eviction policy on the time to first token."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import best_of, in_order, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

BLOCKS = 10_000  # of the whole pool
NODES = 16
POLICIES = ("lru", "lfu", "length-aware", "fifo", "s3-fifo", "cost-aware")
PAPER = {"lru": 0.40, "lfu": 0.35, "length-aware": 0.35}


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", requests)
    return [
        Case(policy, SimConfig(eviction=policy, cache_blocks=0, pool_blocks=BLOCKS // NODES), work)
        for policy in POLICIES
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    hits = best_of(values, "hit rate", {policy: policy for policy in POLICIES})
    quick = best_of(values, "mean TTFT, s", {policy: policy for policy in POLICIES}, most=False)
    rates = ", ".join(told(values[policy]["hit rate"], ".3f") for policy in POLICIES)
    theirs = in_order(values, "hit rate", list(PAPER))
    return (
        f"By hit rate {hits} ({rates} in the order of the cases); by mean TTFT {quick}. The paper's order, lru, lfu, "
        f"length-aware, is {theirs}; its rates are of blocks and of the arXiv trace. Rates of blocks at all sizes, "
        "without timing and compared with another program's: scripts/tools.py cache-policies."
    )


EVICTION = Ablation(
    "eviction",
    "Which blocks should go when the pool is full?",
    f"8P+8D, conversation trace; only a pool of {BLOCKS:,} blocks keeps KV.",
    cases,
    metrics("hit rate", "mean TTFT, s"),
    reading,
    PAPER,
    "v3 Table 1, 10,000 blocks",
)
