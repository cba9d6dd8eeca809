"""FAST'25 Fig. 13: the bandwidth above which reuse over the network pays."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.looks import utilisation
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

GBIT = (5, 10, 24, 40, 80, 160, 320)
PAPER = {24: 5.09, 40: 2.40, 80: 1.73, 160: 1.41, 320: 1.24}


def cases(requests: int | None) -> list[Case]:
    work = Workload("synthetic", requests, jitter_s=0.0)
    base = {"cache_blocks": 0, "prefill": 8, "decode": 8}
    made = [Case("recompute", SimConfig(**base), work, look=(utilisation,))]  # type: ignore[arg-type]
    for gbit in GBIT:
        config = SimConfig(**base, pool_blocks=6000, nic_gbit_s=float(gbit))  # type: ignore[arg-type]
        made.append(Case(f"{gbit} Gbit/s", config, work, look=(utilisation,), series="mean TTFT, s", x=gbit))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    line = values["recompute"]["mean TTFT, s"].mean
    paying = [gbit for gbit in GBIT if values[f"{gbit} Gbit/s"]["mean TTFT, s"].mean < line]
    least = f"{min(paying)} Gbit/s" if paying else "none of these rates"
    return (
        f"Recomputing takes {line:.2f} s (paper 2.62); reuse pays from {least} on (paper: between 24 and 40). "
        f"Without reuse our prefill nodes are {values['recompute']['prefill utilisation'].mean:.0%} busy, so that "
        "prompts queue; at the paper's 2.62 s they do not. "
        "Algorithm 1 refuses fetches slower than computing: a slow network costs little here, but much there."
    )


BANDWIDTH = Ablation(
    "bandwidth",
    "Which bandwidth does the pool need?",
    "8P+8D, the synthetic trace; nodes keep no KV of their own, every reused prefix crosses the network.",
    cases,
    metrics("mean TTFT, s", "hit rate", "moved, TB", "prefill utilisation"),
    reading,
    {f"{gbit} Gbit/s": value for gbit, value in PAPER.items()} | {"recompute": 2.62},
    "FAST'25 Fig. 13",
    x_name="network of a node, Gbit/s",
)
