"""The facts that nodes must have in common before they share KV. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cache.block import BlockGeometry
from engine.config.config import Config

KV = "kv"
"""The entry of identity() about a node's own blocks: KvBlocks as a dict. A process without an arena has none."""


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The blocks of a node's arena, and whether it can convert them for a node whose blocks differ."""

    dtype: str
    block_size: int
    converts: bool


def kv_of(info: Mapping[str, Any]) -> KvBlocks | None:
    """From what a node tells the others; None if it has no arena."""
    told = info.get(KV)
    return None if told is None else KvBlocks(str(told["dtype"]), int(told["block_size"]), bool(told["converts"]))


def identity(config: Config, cluster: BlockGeometry, root: str) -> dict[str, Any]:
    """The facts that nodes compare before they share KV: `theirs` of `disagreement`. cluster: the cluster's blocks;
    root: hex."""
    told = {
        "model": config.served_model_name,
        "root": root,
        "block_size": cluster.block_size,
        "dtype": cluster.dtype,
        "pool_dtype": config.pool_dtype,
        "wire_dtype": config.wire_dtype,
    }
    if not config.computes:
        return told
    converts = config.device == "cpu" and cluster.groups is None
    return told | {KV: asdict(KvBlocks(config.kv_cache_dtype, config.block_size, converts))}


def disagreement(config: Config, root: str, theirs: Mapping[str, Any]) -> str | None:
    """Why a node with the resolved `config` and the root key `root` (hex) cannot share KV with a node that sent
    `theirs`, with the remedy; None if they can. `theirs` contains model, block_size, dtype, pool_dtype and wire_dtype
    (of the cluster's KV) and root, like GET /cluster; a node of another version may omit some."""
    if lacking := {"model", "block_size", "dtype", "pool_dtype", "wire_dtype", "root"} - set(theirs):
        return f"the other side does not report its {', '.join(sorted(lacking))}: it runs another version of Mooncake"
    for name, flag, ours in (
        ("block_size", "--cluster-block-size", config.cluster_block_size),
        ("dtype", "--cluster-kv-dtype", config.cluster_kv_dtype),
        ("pool_dtype", "--pool-dtype", config.pool_dtype),
        ("wire_dtype", "--wire-dtype", config.wire_dtype),
    ):
        if theirs[name] != ours:
            return f"the cluster has {flag} {theirs[name]}, not {ours}; give this node the same"
    if theirs["root"] != root:
        return (
            f"the cluster serves {theirs['model']}, and --model {config.model} has other weights; "
            "start this node with the same model, --weight-dtype, --kv-groups and --pool-windows, and with "
            "--speculative-method mtp or eagle only if the cluster has it"
        )
    if theirs["model"] != config.served_model_name:
        return (
            f"the cluster serves its model as {theirs['model']}, not {config.served_model_name}; pass "
            f"--served-model-name {theirs['model']}, or leave it out"
        )
    return None


def unlike(own: KvBlocks | None, theirs: KvBlocks | None) -> str | None:
    """Why KV cannot move between two nodes with these blocks, with the remedy; None if it can."""
    if own is None or theirs is None or (own.dtype, own.block_size) == (theirs.dtype, theirs.block_size):
        return None
    if own.converts and theirs.converts:
        return None
    return (
        f"a node here has --kv-cache-dtype {theirs.dtype} --block-size {theirs.block_size}, this node "
        f"{own.dtype} and {own.block_size}, and one of the two cannot convert (GPU memory, or layers in groups); give "
        "both nodes the same"
    )
