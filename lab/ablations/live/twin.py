"""The simulated counterpart of nodes on this machine: the same configuration, the same requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.ablations.live.loads import in_blocks
from lab.launch.nodes import parse_nodes
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import EMBEDDED_CPU, StepModel
from lab.simulator.result import figures


def base_model(name: str, config: Mapping[str, Any], kv_tokens: int) -> StepModel:
    """The model of these nodes before it is fitted: their limits. config: the Config of a node."""
    return replace(
        EMBEDDED_CPU,
        name=name,
        token_bytes=int(config["kv_cache_bytes"]) // kv_tokens,
        kv_tokens=kv_tokens,
        chunk_tokens=int(config["max_num_batched_tokens"]),
        max_batch=int(config["max_num_seqs"]),
    )


def twin(
    nodes: str,
    config: Mapping[str, Any],
    kv_tokens: int,
    contention: float = 0.0,
    tiers: Mapping[str, Mapping[str, Any]] | None = None,
) -> SimConfig:
    """The simulated nodes for those that run a model; `nodes` as for LocalCluster. `tiers`: what a node that is only a
    store says of its tiers (`store` of GET /debug/state), because an SSD keeps a part of its bytes free; None: its part
    is not simulated. Its requests have the blocks of the nodes (in_blocks)."""
    size, tiers = int(config["block_size"]), tiers or {}
    kinds = Counter(_kind(role) for _, role in parse_nodes(nodes) if role != "store")
    return SimConfig(
        prefill=kinds["prefill"],
        decode=kinds["decode"],
        mixed=kinds["mixed"],
        store=sum(role == "store" for _, role in parse_nodes(nodes)) if tiers else 0,
        pool_blocks=int(tiers["dram"]["capacity"]) if tiers else 0,
        ssd_blocks=int(tiers["ssd"]["capacity"]) if "ssd" in tiers else 0,
        placement=str(config["placement"]),
        queue_order=str(config["queue_order"]),
        slo=str(config["slo"]),
        eviction=str(config["eviction"]),
        kv_blocks=kv_tokens // size,
        block_tokens=size,
        batching_policy=str(config["batching_policy"]),
        prefill_chunk_tokens=int(config["prefill_chunk_tokens"]),
        tbt_budget_s=float(config["tbt_budget_ms"]) / 1000,
        max_step_s=float(config["max_step_ms"]) / 1000,
        step_prompts=int(config["max_num_seqs"]),
        contention=contention,
        reservations=True,
        probe_s=0.0,  # included in the model's front_s
    )


def simulate(config: SimConfig, model: StepModel, rows: Sequence[TraceRow]) -> tuple[dict[str, Any], Cluster]:
    """(figures, the cluster after the run); `rows`: with blocks of LIVE_BLOCK tokens."""
    cluster = Cluster(config, model).played(in_blocks(rows, config.block_tokens))
    return figures(cluster), cluster


def _kind(role: str) -> str:
    """'prefill', 'decode' or 'mixed': the part of the model's work that this role does."""
    roles = set(role.split(","))
    if "mixed" in roles or {"prefill", "decode"} <= roles:
        return "mixed"
    return "prefill" if "prefill" in roles else "decode"
