"""The shape of KV blocks, from flags and a model's configuration.

Pure. Raises UsageError, naming the flag to change, for a shape that this model cannot have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from cache.block import BlockGeometry, pool_types, type_bytes
from cache.layer_groups import layer_groups
from engine.config.config import Config
from engine.config.flags import UsageError


class ModelSizes(Protocol):
    """The required facts of a model's configuration (engine/model/model_config.py)."""

    @property
    def kv_layers(self) -> int:
        """With KV or a state."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_size(self) -> int: ...

    @property
    def kv_kind(self) -> str:
        """A key of cache.block.PLANES."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer, in tokens; 0: none. Empty: no layer has one."""

    @property
    def states(self) -> tuple[bool, ...]:
        """Which layers keep a state instead of KV of tokens; empty: none."""

    def state_bytes(self, item_bytes: int) -> int:
        """Of one such layer, in a KV arena with elements of `item_bytes`."""

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def indivisible(self, ranks: int) -> str | None:
        """Why tensor parallelism cannot split the model over `ranks` ranks; None if it can."""

    def unshareable(self, ranks: int, least: int, redundant: int) -> str | None:
        """Why its experts cannot be shared out over `ranks` ranks like this; None if they can."""


def geometry(config: Config, model: ModelSizes, kv_dtype: str) -> BlockGeometry:
    """Shape of this node's KV blocks. Raises UsageError."""
    if any(model.states):
        _check_states(config, kv_dtype)
        item, kind = type_bytes[kv_dtype], model.kv_kind
        layer_bytes = BlockGeometry(1, model.num_kv_heads, model.head_size, config.block_size, kv_dtype, kind=kind)
        groups = layer_groups(model.windows, model.states, model.state_bytes(item), layer_bytes.layer_bytes)
        groups = groups and replace(groups, state_interval=config.state_interval)
    else:
        groups = layer_groups(model.windows) if config.kv_groups == "windows" else None
    if groups is not None and groups.has_windows and config.pool_windows == "ends":
        groups = replace(groups, pools_ends=True)
    if groups is not None and config.speculative_method == "eagle":
        raise UsageError(
            "--speculative-method eagle: the layers of this model are in groups, and the head's would be one more; "
            "give --kv-groups uniform"
        )
    if groups is not None and config.prefill_parallel != "none":
        states = any(model.states)
        why, remedy = ("states", "none") if states else ("--kv-groups windows", "--kv-groups uniform")
        raise UsageError(
            f"--prefill-parallel {config.prefill_parallel}: with {why} one node computes all layers of a prompt of "
            f"this model; give {remedy}"
        )
    layers = model.kv_layers if groups is None else groups.layers
    sizes = layers, model.num_kv_heads, model.head_size, config.block_size
    return BlockGeometry(*sizes, kv_dtype, config.pool_dtype, config.wire_dtype, model.kv_kind, groups)


def cluster_geometry(config: Config, model: ModelSizes) -> BlockGeometry:
    """Shape of the cluster's KV blocks, for a resolved Config: those that keys name and the pool keeps."""
    return geometry(replace(config, block_size=config.cluster_block_size), model, config.cluster_kv_dtype)


def _check_states(config: Config, kv_dtype: str) -> None:
    """Raises UsageError for flags that a model with states cannot have."""
    if config.kv_groups == "uniform":
        raise UsageError("--kv-groups uniform: some layers of this model keep a state, not KV of tokens; give windows")
    for flag, dtype in (
        ("--kv-cache-dtype", kv_dtype),
        ("--pool-dtype", config.pool_dtype),
        ("--wire-dtype", config.wire_dtype),
    ):
        if dtype in pool_types:
            raise UsageError(f"{flag} {dtype}: the states of this model have no such encoding; leave it on auto")
    if config.speculative_method not in ("none", "ngram", "suffix"):
        raise UsageError(
            f"--speculative-method {config.speculative_method}: with states, drafts are looked up in texts, because "
            "no model that drafts has been tried with them; give ngram, suffix or none"
        )
