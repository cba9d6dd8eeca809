"""KV between real nodes: overlapped with computation or not, in 16 or in 8 bits."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated, ratio
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.loads import Shape

OVERLAP_WORK = of_shape("long prompts", Shape(prompt=(1200.0, 0.3), answer=(8.0, 0.2), shared=0.0, rate=0.5))
OVERLAP_LIMIT = 60_000_000  # bytes/s: a prompt's KV takes about as long as the prompt
POOL_WORK = of_shape("texts", Shape(prompt=(1200.0, 0.3), answer=(8.0, 0.2), shared=1.0, documents=8, rate=0.8))
POOL_LIMIT = 100_000_000
POOL_FLAGS = ("--kv-cache-bytes", "80M", "--rail-limit", str(POOL_LIMIT))


def overlap_cases(requests: int | None) -> list[LiveCase]:
    flags = ("--rail-limit", str(OVERLAP_LIMIT), "--no-enable-prefix-caching")
    return [
        LiveCase(name, OVERLAP_WORK, "prefill=1,decode=1", ("--kv-overlap", name, *flags))
        for name in ("layer", "chunk", "none")
    ]


def overlap_reading(values: dict[str, dict[str, Estimated]]) -> str:
    gap = ratio(values, "mean first gap, ms", "none", "layer")
    cost = ratio(values, "mean TTFT, s", "layer", "none")
    return f"Without overlap the gap after the first token is {gap:.1f}x; layer-wise has {cost:.2f}x its mean TTFT."


OVERLAP = Ablation(
    "overlap",
    "What does the layer-wise hand-over hide, between two real nodes?",
    f"1P+1D, a core each, prompts of about 1,200 tokens (28 MB of KV), transfers limited to {OVERLAP_LIMIT // 10**6} "
    "MB/s by --rail-limit, no prefix cache; the first gap is that between the first two tokens of an answer.",
    overlap_cases,
    metrics("mean first gap, ms", "p99 first gap, ms", "mean TTFT, s"),
    overlap_reading,
)


def quantized_reading(values: dict[str, dict[str, Estimated]]) -> str:
    names = [name for name in values if name != "16 bits"]
    gains = {name: ratio(values, "mean TTFT, s", name, "16 bits") for name in names}
    told = ", ".join(f"{name} {gain:.2f}x" for name, gain in gains.items())
    return f"Mean TTFT of 16-bit blocks at {POOL_LIMIT // 10**6} MB/s: {told}."


def quantized_cases(requests: int | None) -> list[LiveCase]:
    wanted = {
        "16 bits": ("--prefix-fetch", "always"),
        "fp8": ("--prefix-fetch", "always", "--pool-dtype", "fp8"),
        "int8": ("--prefix-fetch", "always", "--pool-dtype", "int8"),
        "fp8 arena too": ("--prefix-fetch", "always", "--kv-cache-dtype", "fp8"),
        "int8 arena too": ("--prefix-fetch", "always", "--kv-cache-dtype", "int8"),
        "no pool": ("--prefix-fetch", "never"),
    }
    nodes = "prefill+decode=1,store=1"
    return [LiveCase(name, POOL_WORK, nodes, (*POOL_FLAGS, *flags)) for name, flags in wanted.items()]


QUANTIZED = Ablation(
    "quantization",
    "What do 8-bit blocks gain on real nodes: in the pool and on the wire (--pool-dtype), and also in the arena "
    "(--kv-cache-dtype)?",
    "One node that prefills and decodes with 80 MB of KV (3,600 tokens of 16 bits), one store node; every prompt "
    f"begins with half of its length from one of 8 texts, transfers limited to {POOL_LIMIT // 10**6} MB/s by "
    "--rail-limit. Quality: scripts/bench.py quantization.",
    quantized_cases,
    metrics("mean TTFT, s", "p90 TTFT, s", "hit rate"),
    quantized_reading,
)
