"""KV between real nodes: overlapped with computation or not, in 16 or in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import relative
from lab.ablations.common.metrics import metric, metrics
from lab.ablations.live.case import LiveCase, Workload, of_shape
from lab.ablations.live.loads import VOCABULARY, Shape
from lab.ablations.live.play import Played
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.launch import rest

OVERLAP_TOKENS, OVERLAP_EVERY_S = 2000, 6.0
OVERLAP_LIMIT = 60_000_000  # bytes/s: a prompt's KV takes about as long as the prompt
POOL_WORK = of_shape("texts", Shape(prompt=(1200.0, 0.3), answer=(8.0, 0.2), shared=1.0, documents=8, rate=0.8))
POOL_LIMIT = 100_000_000
POOL_FLAGS = ("--kv-cache-bytes", "80M", "--rail-limit", str(POOL_LIMIT))


def lone_prompts(seed: int, seconds: float) -> list[Spec]:
    """One prompt at a time."""
    source, count = TokenSource(seed, VOCABULARY), max(1, int(seconds / OVERLAP_EVERY_S))
    return [Spec(source.tokens(OVERLAP_TOKENS, SUFFIX, i), 4, OVERLAP_EVERY_S * i) for i in range(count)]


def transfers(urls: Sequence[str]) -> Callable[[Played], dict[str, float]]:
    """Means over the requests, from their timelines on the nodes. Raises RestError."""

    def figures(played: Played) -> dict[str, float]:
        ids = [one.request_id for one in played.outcomes if one.error is None]
        moves = [moved(rest.get(f"{urls[0]}/live/requests/{name}")) for name in ids]
        return {name: fmean(move[name] for move in moves) for name in moves[0]}

    return figures


def moved(record: Mapping[str, Any]) -> dict[str, float]:
    """transfer_ms: the time in which bytes of the prompt's KV were on their way; hidden_ms: the part of it in which the
    node also computed the prompt."""
    hidden, share = record["summary"]["transfer_hidden_ms"], record["summary"]["overlap_efficiency"]
    shown = 1000 * sum(event["detail"]["seconds"] for event in record["events"] if event["event"] == "kv_moved")
    return {"transfer_ms": hidden / share if share else shown, "hidden_ms": hidden, "hidden_share": share}


def overlap_cases(requests: int | None) -> list[LiveCase]:
    flags = ("--transport", "tcp", "--rail-limit", str(OVERLAP_LIMIT), "--no-enable-prefix-caching")
    sizes = ("--kv-cache-bytes", "400M", "--max-num-batched-tokens", "1024")
    work = Workload("lone prompts", lone_prompts)
    return [
        LiveCase(
            f"{how}, {overlap}", work, "prefill=1,decode=1",
            ("--kv-transfer", how, "--kv-overlap", overlap, *flags, *sizes), look=transfers,
        )
        for how in ("push", "pull")
        for overlap in ("none", "chunk", "layer")
    ]  # fmt: skip


def overlap_reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [
        f"{how}: without overlap the gap after the first token changes by "
        f"{relative(values, 'first to second token', f'{how}, none', f'{how}, layer')}, mean TTFT by "
        f"{relative(values, 'TTFT', f'{how}, none', f'{how}, layer')}"
        for how in ("push", "pull")
    ]
    return f"Against layer-wise hand-over, {'; '.join(said)}."


OVERLAP = Ablation(
    "overlap",
    "What does the layer-wise hand-over hide, between two real nodes?",
    f"1P+1D, a core each, lone prompts of {OVERLAP_TOKENS:,} tokens (46 MB of KV) in steps of 1,024, transfers limited "
    f"to {OVERLAP_LIMIT // 10**6} MB/s by --rail-limit, no prefix cache; hidden: the part of the transfer during which "
    "the prompt is computed. The second token is the first that needs the KV on the decode node. Times in ms.",
    overlap_cases,
    {
        "transfer": metric("transfer_ms"),
        "hidden": metric("hidden_ms"),
        "overlap efficiency": metric("hidden_share"),
        "TTFT": metric("ttft_s", "mean", 1000),
        "first to second token": metric("first_gap_s", "mean", 1000),
    },
    overlap_reading,
)


def quantized_reading(values: dict[str, dict[str, Estimated]]) -> str:
    names = [name for name in values if name != "16 bits"]
    told = ", ".join(f"{name} {relative(values, 'mean TTFT, s', name, '16 bits')}" for name in names)
    return f"Mean TTFT against 16-bit blocks at {POOL_LIMIT // 10**6} MB/s: {told}."


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
