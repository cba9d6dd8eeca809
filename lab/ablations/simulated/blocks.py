"""KV transfers: overlapped with computation or not, in 16 or in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload, ratio
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
    gap = ratio(values, "mean longest gap, ms", "at the end", "layer-wise")
    return (
        f"Without overlap the longest gap of a request is {gap:.2f}x; the first token needs no hand-over. The paper "
        "says that a prefill takes as long as the longer of loading and computing; here, too, a copy costs the "
        "step nothing, which real nodes do not reach (--live)."
    )


def quantized_cases(requests: int | None) -> list[Case]:
    work = Workload("synthetic", requests, jitter_s=0.0)
    whole = SimConfig(cache_blocks=0, pool_blocks=6000, nic_gbit_s=GBIT)
    return [Case("16 bits", whole, work), Case("8 bits", replace(whole, pool_blocks=12_000, kv_scale=0.5), work)]


def quantized_reading(values: dict[str, dict[str, Estimated]]) -> str:
    gain = ratio(values, "mean TTFT, s", "8 bits", "16 bits")
    return (
        f"At {GBIT:g} Gbit/s 8-bit blocks change mean TTFT to {gain:.2f}x: half the bytes, twice the blocks. "
        "The time to quantize is not simulated, and a faster network leaves less to gain."
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
