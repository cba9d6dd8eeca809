"""What a lost node, a slow node and lost gossip cost."""

from __future__ import annotations

from dataclasses import replace

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric
from sim.config import SimConfig

FAULTS = {
    "no fault": {},
    "a prefill node is lost": {"faults": "crash:prefill-0@100+60"},
    "a decode node is lost": {"faults": "crash:decode-0@100+60"},
    "a prefill node is 4 times slower": {"faults": "slow:prefill-0@100+300x4"},
    "a crash every 60 s": {"crash_every_s": 60.0},
    "half of the records lost": {"gossip_loss": 0.5},
}


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 2000, 2000))
    base = SimConfig(pool_blocks=6000)
    return [Case(name, replace(base, **change), work) for name, change in FAULTS.items()]  # type: ignore[arg-type]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    whole = values["no fault"]
    lost = [
        f"{name} {100 * (values[name]['goodput'].mean - whole['goodput'].mean):+.1f} points, TTFT "
        f"{values[name]['mean TTFT, s'].mean / whole['mean TTFT, s'].mean - 1:+.1%}"
        for name in FAULTS
        if name != "no fault"
    ]
    return "Against no fault, goodput and mean TTFT: " + "; ".join(lost) + "."


FAILURE = Ablation(
    "failure",
    "What do a lost node, a slow node and lost gossip cost?",
    "8P+8D, conversation trace; a lost node is back, empty, after 60 s (30 s when crashes come by seed), and its loss "
    "is known after 1 s; a record that a gossip round does not bring stays as it was.",
    cases,
    {
        "mean TTFT, s": metric("ttft_s", "mean"),
        "p99 TTFT, s": metric("ttft_s", "p99"),
        "goodput": metric("goodput"),
        "p99 longest gap, s": metric("longest_gap_s", "p99"),
        "attempts lost": metric("retries"),
    },
    reading,
)
