"""The form of this node's KV blocks and that of the cluster's: what the pool keeps and block keys cover. Pure.

A node whose blocks differ converts what it sends, and what it reads from the pool (engine/unlike/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cache.block import INT4_WHEN_IT_PAYS, SCALE_BYTES, encodings, pool_types
from engine.config.config import Config
from engine.config.flags import UsageError


def with_cluster_form(
    config: Config, kv_dtype: str, head_size: int, runs_model: bool, cluster: Mapping[str, Any] | None
) -> Config:
    """`config` with the form of the cluster's blocks, and with `kv_dtype` as its own type. A node without an arena has
    no form of its own. cluster: the answer to GET /cluster of the node to join. Raises UsageError."""
    there = cluster or {}
    tokens, dtype = config.cluster_block_size, config.cluster_kv_dtype
    config = replace(
        config,
        kv_cache_dtype=kv_dtype,
        cluster_block_size=int(there.get("block_size", config.block_size)) if tokens == -1 else tokens,
        cluster_kv_dtype=str(there.get("dtype", kv_dtype)) if dtype == "auto" else dtype,
    )
    if not runs_model:
        config = replace(config, block_size=config.cluster_block_size, kv_cache_dtype=config.cluster_kv_dtype)
    for flags, wanted, size in (
        (("--kv-cache-dtype", "--block-size"), config.kv_cache_dtype, config.block_size),
        (("--cluster-kv-dtype", "--cluster-block-size"), config.cluster_kv_dtype, config.cluster_block_size),
    ):
        if wanted in encodings and head_size * size % SCALE_BYTES:
            raise UsageError(
                f"{flags[0]} {wanted}: a block has {size} tokens of {head_size} elements, not a multiple of "
                f"{SCALE_BYTES}, so its scales are not aligned; give {flags[1]} {SCALE_BYTES} or a multiple"
            )
    return config


def differs(config: Config) -> bool:
    """Whether the blocks of this node, resolved, are not like those of the cluster."""
    return (config.block_size, config.kv_cache_dtype) != (config.cluster_block_size, config.cluster_kv_dtype)


def feeds_pool(config: Config) -> bool:
    """Whether this node, resolved, puts its blocks into the pool. No block of the pool is less precise than the pool's
    type says; of types of one byte, none counts as less precise than another."""
    if config.kv_cache_dtype == config.cluster_kv_dtype or config.kv_cache_dtype == "float32":
        return True
    return config.cluster_kv_dtype in encodings or config.pool_dtype in pool_types


def check_conversion(config: Config, device: str, grouped: bool) -> None:
    """Raises UsageError if this node, resolved, cannot convert between its blocks and the cluster's. grouped: the
    layers of the model are in groups (cache/layer_groups.py)."""
    size = config.cluster_block_size
    if config.block_size % size:
        raise UsageError(
            f"--block-size {config.block_size}: a block of the cluster has {size} tokens, one of a node a multiple of "
            f"that; give --block-size {size}, or start the cluster with a --cluster-block-size that divides both"
        )
    if not differs(config):
        return
    same = f"--block-size {size} --kv-cache-dtype {config.cluster_kv_dtype}"
    what = f"--block-size {config.block_size} --kv-cache-dtype {config.kv_cache_dtype}"
    if device == "cuda":
        raise UsageError(f"{what}: blocks in GPU memory are not converted to those of the cluster; give {same}")
    if grouped:
        raise UsageError(
            f"{what}: blocks of a model whose layers are in groups are not converted to those of the cluster; give "
            f"{same}, or for a model without states --kv-groups uniform to all nodes"
        )
    if config.pool_dtype == INT4_WHEN_IT_PAYS:
        raise UsageError(
            f"{what}: with --pool-dtype {INT4_WHEN_IT_PAYS} no node converts its blocks to others of the cluster; give "
            f"{same}, or --pool-dtype int4 to all nodes"
        )
    if config.beyond_memory == "on" and "decode" in config.roles:
        raise UsageError(f"--beyond-memory on: the tier must keep blocks as the arena does; give {same}")
    if config.attention_elsewhere != "off":
        raise UsageError(
            f"--attention-elsewhere {config.attention_elsewhere}: a holder attends to blocks as its arena has them; "
            f"give {same}"
        )
