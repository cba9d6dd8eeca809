"""The facts that nodes must have in common before they share KV. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache.block import BlockGeometry, encodings
from engine.config.config import Config


def identity(config: Config, geometry: BlockGeometry, root: str) -> dict[str, Any]:
    """The facts that nodes compare before they share KV: `theirs` of `disagreement`. root: hex."""
    return {
        "model": config.served_model_name,
        "root": root,
        "block_size": config.block_size,
        "dtype": geometry.dtype,
        "pool_dtype": config.pool_dtype,
        "wire_dtype": config.wire_dtype,
    }


def disagreement(config: Config, root: str, theirs: Mapping[str, Any]) -> str | None:
    """Why a node with the resolved `config` and the root key `root` (hex) cannot share KV with a node that sent
    `theirs`, with the remedy; None if they can. `theirs` contains model, block_size, dtype, pool_dtype and wire_dtype
    (of the KV) and root, like GET /cluster; a node of another version may omit some."""
    if lacking := {"model", "block_size", "dtype", "pool_dtype", "wire_dtype", "root"} - set(theirs):
        return f"the other side does not report its {', '.join(sorted(lacking))}: it runs another version of Mooncake"
    if theirs["block_size"] != config.block_size:
        return f"the cluster has --block-size {theirs['block_size']}, not {config.block_size}; give this node the same"
    if theirs["dtype"] != config.kv_cache_dtype:
        quantized = theirs["dtype"] in encodings or config.kv_cache_dtype in encodings
        flag = "--kv-cache-dtype" if quantized else "--dtype"
        return f"the cluster keeps KV in {theirs['dtype']}, not {config.kv_cache_dtype}; pass {flag} {theirs['dtype']}"
    if theirs["pool_dtype"] != config.pool_dtype:
        return f"the cluster has --pool-dtype {theirs['pool_dtype']}, not {config.pool_dtype}; give this node the same"
    if theirs["wire_dtype"] != config.wire_dtype:
        return f"the cluster has --wire-dtype {theirs['wire_dtype']}, not {config.wire_dtype}; give this node the same"
    if theirs["root"] != root:
        return (
            f"the cluster serves {theirs['model']}, and --model {config.model} has other weights; "
            "start this node with the same model and --weight-dtype, and with --speculative-method mtp or eagle only "
            "if the cluster has it"
        )
    if theirs["model"] != config.served_model_name:
        return (
            f"the cluster serves its model as {theirs['model']}, not {config.served_model_name}; pass "
            f"--served-model-name {theirs['model']}, or leave it out"
        )
    return None
