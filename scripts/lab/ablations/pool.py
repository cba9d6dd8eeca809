"""FAST'25 Fig. 10: one pool of all nodes' memory against a cache per node."""

from __future__ import annotations

from dataclasses import replace

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric, ratio
from sim.config import SimConfig

BLOCKS = 5860  # 3M tokens of 512
TRACES = ("conversation", "synthetic")


def cases(requests: int | None) -> list[Case]:
    made = []
    for trace in TRACES:
        work = Workload(trace, requests)
        local = SimConfig(prefill=10, decode=10, placement="local-cache", cache_blocks=BLOCKS)
        # The pool counts blocks per node, and decode nodes are nodes: half of what the prefill nodes give.
        pooled = replace(local, placement="mooncake", cache_blocks=BLOCKS // 4, pool_blocks=BLOCKS * 3 // 8)
        made += [Case(f"local, {trace}", local, work), Case(f"global, {trace}", pooled, work)]
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    gains = [ratio(values, "hit rate", f"global, {trace}", f"local, {trace}") for trace in TRACES]
    work = [ratio(values, "prefill s per request", f"global, {trace}", f"local, {trace}") for trace in TRACES]
    return (
        f"Hits rise {gains[0]:.2f}x and {gains[1]:.2f}x (paper 2.22x and 2.36x), prefill work falls to {work[0]:.2f} "
        f"and {work[1]:.2f} (paper 0.76 and 0.52)."
    )


def busy(result: dict[str, object]) -> float:
    """Prefill seconds per request."""
    shares = result["busy"]
    assert isinstance(shares, dict)
    share = sum(float(value) for name, value in shares.items() if name.startswith("prefill"))
    return metric("seconds")(result) * share / metric("requests")(result)


POOL = Ablation(
    "pool",
    "What does one global cache bring over a cache per node?",
    "10 prefill nodes with 3M tokens each: all of it its own, or a quarter its own and the rest pooled. Hit rate: "
    "prompt tokens whose KV was found, over all.",
    cases,
    {
        "hit rate": metric("token_hit_rate"),
        "prefill s per request": busy,
        "mean TTFT, s": metric("ttft_s", "mean"),
    },
    reading,
    {"local, conversation": 0.169, "global, conversation": 0.375, "local, synthetic": 0.263, "global, synthetic": 0.62},
    "FAST'25 Fig. 10",
)
