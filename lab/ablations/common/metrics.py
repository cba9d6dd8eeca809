"""The metrics of ablations by name: each is read from a run's figures, or from those of a look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Metric = Callable[[dict[str, Any]], float]


def metric(name: str, part: str | None = None, scale: float = 1.0) -> Metric:
    """A figure of lab.simulator.result, of lab.ablations.live.play or of a look; NaN if there is none."""

    def of(result: dict[str, Any]) -> float:
        value = result.get(name)
        if value is not None and part is not None:
            value = value[part]
        return math.nan if value is None else scale * float(value)

    return of


COMMON: dict[str, Metric] = {
    "mean TTFT, s": metric("ttft_s", "mean"),
    "p90 TTFT, s": metric("ttft_s", "p90"),
    "p99 TTFT, s": metric("ttft_s", "p99"),
    "longest TTFT, s": metric("ttft_s", "max"),
    "mean TPOT, ms": metric("tbt_s", "mean", 1000),
    "mean TBT, ms": metric("tail_tbt_s", "mean", 1000),
    "mean longest gap, ms": metric("longest_gap_s", "mean", 1000),
    "p99 longest gap, ms": metric("longest_gap_s", "p99", 1000),
    "mean first gap, ms": metric("first_gap_s", "mean", 1000),
    "p99 first gap, ms": metric("first_gap_s", "p99", 1000),
    "effective": metric("goodput"),
    "goodput": metric("goodput"),
    "hit rate": metric("token_hit_rate"),
    "moved, TB": metric("bytes_moved", scale=1e-12),
    "refused": metric("refused"),
}
"""The metrics that several ablations have."""


BUSY: dict[str, Metric] = {"prefill utilisation": metric("prefill_busy")}
"""Every simulated ablation has it: which cases are saturated. The share of the time in which nodes of the role prefill
compute prompts; steps of mixed nodes count if a prompt is in them."""


def metrics(*names: str) -> dict[str, Metric]:
    """Those of COMMON with these names, in this order."""
    return {name: COMMON[name] for name in names}


COSTS: dict[str, Metric] = {
    "node-hours": metric("node_hours"),
    "cost per million good tokens": metric("cost_per_million_tokens"),
}
"""Every simulated ablation has them: the nodes' time, and its cost (--prefill-cost, --decode-cost: 1 per node and hour)
over the prompt and answer tokens of the requests that met their objectives."""
