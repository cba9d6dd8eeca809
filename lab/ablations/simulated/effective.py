"""FAST'25 Figures 1, 6, 7: requests within their objectives, with Mooncake and with vLLM on the same nodes."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import best_of, compared, told
from lab.ablations.common.looks import Effective
from lab.ablations.common.metrics import metric
from lab.simulator.config import SimConfig

TRACES = ("conversation", "toolagent", "synthetic")
LIMITS_S = (0.2, 0.1, 0.3)
MOONCAKE = "Mooncake"
SYSTEMS = {
    MOONCAKE: SimConfig(pool_blocks=6000),
    "vLLM": SimConfig(
        prefill=0, decode=0, mixed=16, placement="least-load", cache_blocks=0, batching_policy="prefill-first"
    ),
    "vLLM + prefix": SimConfig(
        prefill=0, decode=0, mixed=16, placement="least-load", batching_policy="prefill-first"
    ),
    "vLLM + chunked": SimConfig(
        prefill=0, decode=0, mixed=16, placement="least-load", cache_blocks=0, batching_policy="mixed",
        prefill_chunk_tokens=512,
    ),
}  # fmt: skip
PAPER = {  # at 200, 100, 300 ms
    "conversation": ((99.9, 96.6, 100), (38.8, 16.1, 62.7), (34.3, 15.0, 55.5), (28.8, 9.4, 55.2)),
    "toolagent": ((99.7, 93.0, 99.9), (44.8, 43.1, 49.7), (70.0, 56.5, 81.2), (21.3, 18.4, 40.1)),
    "synthetic": ((100, 99.6, 100), (70.9, 61.3, 77.9), (70.8, 60.9, 77.2), (57.3, 46.5, 69.5)),
}
"""Read off the figures (reference/papers.md), in the order of SYSTEMS."""


def name_of(limit_s: float) -> str:
    return f"effective at {1000 * limit_s:.0f} ms"


def cases(requests: int | None) -> list[Case]:
    return [
        Case(f"{system}, {trace}", config, Workload(trace, min(requests or 6000, 6000)), look=(Effective(LIMITS_S),))
        for trace in TRACES
        for system, config in SYSTEMS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said, name = [], name_of(0.2)
    for trace in TRACES:
        rivals = {f"{system}, {trace}": system for system in SYSTEMS if system != MOONCAKE}
        ours, theirs = f"{MOONCAKE}, {trace}", [row[0] / 100 for row in PAPER[trace]]
        said.append(
            f"{trace} {told(values[ours][name], '.1%')}, {compared(values, name, ours, rivals)}; of the others "
            f"{best_of(values, name, rivals)} (paper {theirs[0]:.1%} and at most {max(theirs[1:]):.1%})"
        )
    others = "; ".join(
        f"{trace} " + ", ".join("/".join(f"{value:g}" for value in row[1:]) for row in PAPER[trace]) for trace in TRACES
    )
    return (
        f"{MOONCAKE} at 200 ms: {'; '.join(said)}. The paper's other values in %, at 100/300 ms, in the order of the "
        f"cases: {others}. The rivals here are one scheduler with vLLM's policies over the same step times, not vLLM "
        "0.5.1: prefill first with whole prompts, or chunks of 512 tokens per decode step; requests go to the node "
        "with the least queue."
    )


EFFECTIVE = Ablation(
    "effective",
    "How many requests are served well on the same 16 nodes?",
    "16 nodes, 8P+8D or mixed; effective = TTFT <= 30 s and TBT (mean of a request's longest tenth of gaps) <= 100, "
    "200 or 300 ms. Prefixes take what running requests leave of the KV memory of a node. Prefill time: for the tokens "
    "that were not found, on an idle node.",
    cases,
    {name_of(limit): metric(f"effective_{1000 * limit:.0f}") for limit in LIMITS_S}
    | {
        "mean TTFT, s": metric("ttft_s", "mean"),
        "prefill s per request": metric("prefill_s"),
        "hit rate": metric("token_hit_rate"),
    },
    reading,
    {
        f"{system}, {trace}": PAPER[trace][place][0] / 100
        for trace in TRACES
        for place, system in enumerate(SYSTEMS)
    },
    "FAST'25 Figures 1, 6 and 7",
)  # fmt: skip
