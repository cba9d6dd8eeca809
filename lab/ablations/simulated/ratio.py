"""FAST'25 Fig. 15: the ratio of prefill to decode nodes, 16 in total."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import best_of, leaders, points, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

SPLITS = (5, 6, 7, 8, 9, 10, 11)
PAPER = (0.777, 0.972, 0.991, 0.990, 0.992, 0.984, 0.861)


def label(prefill: int) -> str:
    return f"{prefill}P{16 - prefill}D"


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label(prefill),
            SimConfig(prefill=prefill, decode=16 - prefill, pool_blocks=6000),
            Workload("synthetic", requests, jitter_s=0.0),
            ttft_slo_s=10.0,
            tbt_slo_s=0.1,
            tail_tbt=True,
            series="effective share",
            x=prefill,
        )
        for prefill in SPLITS
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    splits = {label(prefill): label(prefill) for prefill in SPLITS}
    best = leaders(values, "effective", list(splits))[0]
    most = told(values[best]["effective"], ".1%")
    return (
        f"{best_of(values, 'effective', splits)} (paper: 9P7D). Against {best} with {most}, 5 prefill nodes "
        f"{points(values, 'effective', label(5), best)} (paper -21), 5 decode nodes "
        f"{points(values, 'effective', label(11), best)} (paper -13). Absolute times differ: the paper's engine is not "
        "public."
    )


RATIO = Ablation(
    "ratio",
    "How many of 16 nodes should prefill?",
    "The synthetic trace at its own speed; effective = TTFT <= 10 s and TBT (mean of the longest tenth of a "
    "request's gaps) <= 100 ms.",
    cases,
    metrics("effective", "mean TTFT, s", "mean TBT, ms"),
    reading,
    {label(prefill): share for prefill, share in zip(SPLITS, PAPER, strict=True)},
    "FAST'25 Fig. 15",
    x_name="prefill nodes of 16",
)
