"""Orders of the prefill queue: mean slowdown against the longest wait."""

from __future__ import annotations

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric, ratio
from sim.config import SimConfig


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 6000, 6000), speed=1.4)
    return [
        Case(order, SimConfig(queue_order=order, placement="mooncake", prefill=6, decode=6, pool_blocks=6000), work)
        for order in ("fcfs", "edf", "srpt", "weighted-fair")
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    mean, worst = (ratio(values, name, "srpt", "fcfs") for name in ("mean slowdown", "p99 TTFT, s"))
    return f"Aged SRPT has {mean:.2f}x the mean slowdown of FCFS (goal 0.6) and {worst:.2f}x its p99 TTFT."


ORDERS = Ablation(
    "orders",
    "Which prompt should be computed next?",
    "6P+6D, conversation trace 1.4 times as fast, one class: EDF and weighted-fair are FCFS then. Slowdown = TTFT over "
    "the time of the whole prompt on an idle node without any cache, so hits bring it below 1.",
    cases,
    {
        "mean slowdown": metric("slowdown", "mean"),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "p99 TTFT, s": metric("ttft_s", "p99"),
    },
    reading,
)
