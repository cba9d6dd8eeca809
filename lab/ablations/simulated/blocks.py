"""KV transfers: overlapped with computation or not, in 16 or in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

GBIT = 25.0


def overlap_cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 6000, 6000))
    return [
        Case("layer-wise", SimConfig(kv_overlap="layer", nic_gbit_s=100.0, pool_blocks=6000), work),
        Case("at the end", SimConfig(kv_overlap="none", nic_gbit_s=100.0, pool_blocks=6000), work),
    ]


def overlap_reading(values: dict[str, dict[str, Estimated]]) -> str:
    gap, ttft = (
        relative(values, name, "at the end", "layer-wise") for name in ("mean longest gap, ms", "mean TTFT, s")
    )
    return (
        f"Without overlap the longest gap of a request changes by {gap}, mean TTFT by {ttft}. The paper says that a "
        "prefill takes as long as the longer of loading and computing; here a copy costs the step nothing, which real "
        "nodes do not reach (--live)."
    )


def quantized_cases(requests: int | None) -> list[Case]:
    work = Workload("synthetic", requests, jitter_s=0.0)
    whole = SimConfig(cache_blocks=0, pool_blocks=6000, nic_gbit_s=GBIT)
    return [Case("16 bits", whole, work), Case("8 bits", replace(whole, pool_blocks=12_000, kv_scale=0.5), work)]


def quantized_reading(values: dict[str, dict[str, Estimated]]) -> str:
    ttft, moved, hits = (
        relative(values, name, "8 bits", "16 bits") for name in ("mean TTFT, s", "moved, TB", "hit rate")
    )
    return (
        f"At {GBIT:g} Gbit/s 8-bit blocks change mean TTFT by {ttft}, moved bytes by {moved}, hits by {hits}: half the "
        "bytes of a block, twice the blocks. The time to quantize is not simulated."
    )


METRICS = metrics("mean TTFT, s", "mean longest gap, ms", "moved, TB", "hit rate")

OVERLAP = Ablation(
    "overlap",
    "What does the layer-wise hand-over hide?",
    "8P+8D at 100 Gbit/s, conversation trace.",
    overlap_cases,
    METRICS,
    overlap_reading,
)
QUANTIZED = Ablation(
    "quantization",
    "What do 8-bit blocks in the pool and on the wire gain?",
    f"8P+8D at {GBIT:g} Gbit/s, synthetic trace, every reused prefix crosses the network. Quality is not simulated: "
    "scripts/bench.py quantization measures it.",
    quantized_cases,
    METRICS,
    quantized_reading,
)
