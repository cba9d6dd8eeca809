"""The pool's SSD tier: its benefit with little DRAM, and how fast it must be. Not in the papers."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative, sign, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

DRAM, SSD = 200, 6000  # blocks of a node
GBYTE_S = (0.5, 1.0, 3.0, 7.0)
NONE, ALL = "DRAM only", "all of it in DRAM"


def label(speed: float) -> str:
    return f"SSDs of {speed:g} GB/s"


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 5000, 5000))
    little = SimConfig(cache_blocks=DRAM, pool_blocks=DRAM)
    made = [Case(NONE, little, work)]
    for speed in GBYTE_S:
        config = replace(little, ssd_blocks=SSD, ssd_gbyte_s=speed)
        made.append(Case(label(speed), config, work, series="mean TTFT, s", x=speed))
    made.append(Case(ALL, replace(little, pool_blocks=DRAM + SSD), work))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    gains = ", ".join(f"{speed:g} GB/s {relative(values, 'mean TTFT, s', label(speed), NONE)}" for speed in GBYTE_S)
    hits = ", ".join(told(values[case]["hit rate"], ".3f") for case in (NONE, *map(label, GBYTE_S)))
    slow = [f"{speed:g}" for speed in GBYTE_S if sign(values, "mean TTFT, s", label(speed), NONE) > 0]
    return (
        f"Mean TTFT against DRAM only: {gains}, all in DRAM {relative(values, 'mean TTFT, s', ALL, NONE)}; hits {hits} "
        "without SSDs and in the order of their speed. "
        + (f"SSDs of {', '.join(slow)} GB/s make it worse. " if slow else "No speed is shown to make it worse. ")
        + "All nodes' SSDs read a prefix in parallel. Placement knows how long that takes now, and recomputes blocks "
        "when that is faster."
    )


TIERS = Ablation(
    "ssd",
    "What does an SSD tier behind a small pool gain?",
    f"8P+8D, conversation trace; {DRAM} blocks kept in the arena of each node, as many of the pool in its DRAM, {SSD} "
    "on its SSD, written behind and read by all nodes in parallel (bandwidth shared, 500,000 IOPS).",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s", "hit rate"),
    reading,
    x_name="SSD of a node, GB/s",
)
