"""The rivals: their configuration, their source, and the figures that their papers print.

Every system has 16 nodes and, on each node that computes prompts, the same cache. Only those that have a global store
in their paper have a pool here. Placements that work on nodes of one role and on nodes that do both run on both.
docs/rivals.md says of each what is kept and what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.ablations.common.memory import keeping
from lab.simulator.config import SimConfig

DEFAULT = "mooncake"
NO_POOL, FIXED = "mooncake without a pool", "mooncake with fixed roles"
COLOCATED, SPLIT = "colocated", "disaggregated"

PLAIN = {"random": "random", "least loaded": "least-load"}
"""Baselines without ideas: placements of nodes on the nodes and the pool of the default."""

POOL_BLOCKS = CACHE_BLOCKS = 6000
"""Of a node: of its share of the pool, and those that its arena keeps in addition to the memory of its requests."""

PLAIN_NODES = SimConfig(prefill=0, decode=0, mixed=16, batching_policy="dynamic", tbt_budget_s=0.0)
"""As nodes are without --role and --batching-policy."""

SYSTEMS = {
    DEFAULT: replace(PLAIN_NODES, pool_blocks=POOL_BLOCKS),
    NO_POOL: PLAIN_NODES,
    FIXED: SimConfig(pool_blocks=POOL_BLOCKS),
    COLOCATED: SimConfig(
        prefill=0, decode=0, mixed=16, placement="least-load", batching_policy="mixed", prefill_chunk_tokens=512
    ),
    SPLIT: SimConfig(placement="least-load"),
} | {name: replace(PLAIN_NODES, placement=placement, pool_blocks=POOL_BLOCKS) for name, placement in PLAIN.items()}
"""This system as nodes start without flags, without its pool, and with the fixed roles of the paper; the two baselines
of the papers (vLLM with chunked prefill, and DistServe), and the plain ones."""


@dataclass(frozen=True, slots=True)
class Rival:
    """One system of others. `metric`: the one of this ablation that is closest to the paper's figure; `over`: what the
    paper compares with, by our systems or rivals."""

    config: SimConfig
    source: str
    published: str
    metric: str
    over: tuple[str, ...]


RIVALS = {
    "llm-d": Rival(
        SimConfig(placement="llm-d"),
        "llm-d's scorers",
        "p90 TTFT from 92 to 0.54 s at saturation, 16 H100",
        "p90 TTFT, s",
        (SPLIT,),
    ),
    "preble": Rival(
        SimConfig(placement="preble"), "2407.00023", "mean latency 1.5-14.5x lower", "mean TTFT, s", (SPLIT,)
    ),
    "gorgo": Rival(
        SimConfig(placement="gorgo"),
        "2602.11688, June 2026",
        "p95 TTFT 6.9-15.5 % lower than affinity and prefix-cache policies",
        "p90 TTFT, s",
        ("preble",),
    ),
    "banaserve": Rival(
        SimConfig(placement="banaserve", pool_blocks=POOL_BLOCKS),
        "2510.13223",
        "throughput 1.2-3.9x vLLM, 1.1-2.8x DistServe",
        "goodput",
        (COLOCATED, SPLIT),
    ),
    "windserve": Rival(
        SimConfig(placement="windserve", prefill=8, decode=0, mixed=8, batching_policy="mixed"),
        "ISCA 2025",
        "median TTFT 4.28x lower",
        "p50 TTFT, s",
        (SPLIT,),
    ),
    "dopd": Rival(
        SimConfig(pool_blocks=POOL_BLOCKS, role_changes=True, role_policy="dopd"),
        "2511.20982",
        "goodput up to 1.5x",
        "goodput",
        (COLOCATED, SPLIT),
    ),
    "ecoserve": Rival(
        SimConfig(prefill=0, decode=0, mixed=16, placement="ecoserve", batching_policy="prefill-first"),
        "2504.18154",
        "goodput +82 to +127 % over four systems",
        "goodput",
        (COLOCATED, SPLIT),
    ),
    "taichi": Rival(
        SimConfig(prefill=0, decode=0, mixed=16, placement="taichi", batching_policy="mixed", heavy_chunk_tokens=2048),
        "2508.01989",
        "goodput up to +77 %",
        "goodput",
        (COLOCATED, SPLIT),
    ),
    "nexus": Rival(
        SimConfig(prefill=16, decode=16, placement="nexus", prefill_share=0.6, prefill_cost=0.5, decode_cost=0.5),
        "2507.06608; semi-PD 2504.19867",
        "throughput up to 2.2x vLLM; semi-PD 1.55-1.72x requests in time",
        "goodput",
        (COLOCATED,),
    ),
    "dynaserve": Rival(
        SimConfig(
            prefill=0, decode=0, mixed=16, placement="dynaserve", batching_policy="mixed", prefill_chunk_tokens=512
        ),
        "2504.09285v2",
        "goodput up to 1.91x colocated, 1.61x disaggregated",
        "goodput",
        (COLOCATED, SPLIT),
    ),
}  # fmt: skip

MIXED = "{} on mixed nodes"

RIVALS |= {
    MIXED.format(name): replace(
        RIVALS[name],
        config=replace(PLAIN_NODES, placement=name, pool_blocks=RIVALS[name].config.pool_blocks),
        over=(MIXED.format("preble"),) if name == "gorgo" else (COLOCATED,),
    )
    for name in ("llm-d", "preble", "gorgo", "banaserve")
}
"""The placements that need no roles, on the nodes of the default."""

CONFIGS: dict[str, SimConfig] = {
    name: keeping(config, CACHE_BLOCKS)
    for name, config in (SYSTEMS | {name: rival.config for name, rival in RIVALS.items()}).items()
}
