"""FAST'25 Fig. 13: the bandwidth above which reuse over the network pays."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import above, sign, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

GBIT = (5, 10, 24, 40, 80, 160, 320)
PAPER = {24: 5.09, 40: 2.40, 80: 1.73, 160: 1.41, 320: 1.24}


def cases(requests: int | None) -> list[Case]:
    work = Workload("synthetic", requests, jitter_s=0.0)
    base = {"cache_blocks": 0, "prefill": 8, "decode": 8}
    made = [Case("recompute", SimConfig(**base), work)]  # type: ignore[arg-type]
    for gbit in GBIT:
        config = SimConfig(**base, pool_blocks=6000, nic_gbit_s=float(gbit))  # type: ignore[arg-type]
        made.append(Case(f"{gbit} Gbit/s", config, work, series="mean TTFT, s", x=gbit))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    line = told(values["recompute"]["mean TTFT, s"], ".2f", " s")
    rates = paying(values)
    pays = f"reuse pays from {min(rates)} Gbit/s on" if rates else "at none of these rates reuse is shown to pay"
    unused = [gbit for gbit in GBIT if not above(values[f"{gbit} Gbit/s"]["hit rate"], 0.0)]
    return f"Recomputing takes {line} (paper 2.62); {pays} (paper: between 24 and 40)." + (
        f" Nothing is shown to be reused at {', '.join(map(str, unused))} Gbit/s." if unused else ""
    )


def paying(values: dict[str, dict[str, Estimated]]) -> list[int]:
    """The rates from which on every rate reuses prefixes and has a smaller mean than recomputing."""
    found: list[int] = []
    for gbit in reversed(GBIT):
        case = f"{gbit} Gbit/s"
        if sign(values, "mean TTFT, s", case, "recompute") >= 0 or not above(values[case]["hit rate"], 0.0):
            break
        found.append(gbit)
    return found


BANDWIDTH = Ablation(
    "bandwidth",
    "Which bandwidth does the pool need?",
    "8P+8D, the synthetic trace; nodes keep no KV of their own, every reused prefix crosses the network.",
    cases,
    metrics("mean TTFT, s", "hit rate", "moved, TB"),
    reading,
    {f"{gbit} Gbit/s": value for gbit, value in PAPER.items()} | {"recompute": 2.62},
    "FAST'25 Fig. 13",
    x_name="network of a node, Gbit/s",
)
