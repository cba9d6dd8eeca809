"""The ablation `rivals`: each rival on each load, and where one of them beats the default."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.memory import RUNNING
from lab.ablations.common.metrics import metric, metrics
from lab.ablations.rivals.compare import label, one_load, side_by_side
from lab.ablations.rivals.published import CACHE_BLOCKS, CONFIGS
from sched.classes import STANDARD

REQUESTS = 1500
LOADS = {
    "conversation": ("conversation", 1.0),
    "conversation x2": ("conversation", 2.0),
    "synthetic": ("synthetic", 1.0),
    "agents x4": ("agents", 4.0),
}
"""Load -> (trace or generator, how much faster than recorded). At x2 the prefill nodes of a fixed split into 8
and 8 nodes are overloaded."""


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label(system, load),
            config,
            Workload(trace, min(requests or REQUESTS, REQUESTS), speed),
            STANDARD.ttft_s,
            STANDARD.tbt_s,
        )
        for load, (trace, speed) in LOADS.items()
        for system, config in CONFIGS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = " ".join(one_load(values, load) for load in LOADS)
    return (
        f"{said}\n\n{side_by_side(values, tuple(LOADS))}\n\nNot shown: the intervals do not separate the two. The "
        "papers' figures are for other models, GPUs, loads and objectives; of a range they print the best cases."
    )


TABLE = Ablation(
    "rivals",
    "Do the rivals of 2025-26 beat the default?",
    f"16 nodes of llama3-70b; a node that computes prompts keeps {CACHE_BLOCKS:,} blocks, and every node has memory "
    f"for {RUNNING:,} more (each half of Nexus has half of all this); good = TTFT <= {STANDARD.ttft_s:g} s and mean "
    f"time between tokens <= {1000 * STANDARD.tbt_s:.0f} ms; x2 = the trace replayed twice as fast.",
    cases,
    metrics("goodput", "mean TTFT, s")
    | {"p50 TTFT, s": metric("ttft_s", "p50")}
    | metrics("p90 TTFT, s", "mean TPOT, ms", "hit rate"),
    reading,
)
