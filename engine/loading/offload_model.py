"""Builds a model whose weights exceed the memory that they may use (--offload auto). Blocking: runs at start.

Weights that fit are loaded as always. For the others the products are always those of our kernels: only these read
packed weights wherever they are.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from attention.interface import AttentionBackend
from cache.block import BlockGeometry
from engine.checkpoint.layered_weights import open_layered
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import reading_of
from engine.checkpoint.weights import shapes
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.machine import IN_MEMORY, file_system
from engine.model.decoder import Model, Outside
from engine.model.model_config import ModelConfig
from engine.model.ops.cpu import CpuOps
from engine.model.ops.quantized import products_of_kinds, stored_bytes
from engine.offload.streamed import StreamedLayers
from net.compiled import NotCompiled
from sched.offload import Sizes, no_room

log = logging.getLogger("mooncake.engine")

BEHIND, BEFORE = ("o", "gate", "up", "down"), ("q", "k", "v")
"""Matrices behind attention, and those before it, which are read with those of the layer before."""


def load_offloaded(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    backend: AttentionBackend,
    weight_dtype: str,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Model | None:
    """The model, with some of its layers in a file in `folder`; None if all weights fit into --weight-memory-bytes.
    `weight_dtype`: not auto. Raises UsageError, ModelError."""
    dtype, allowed = getattr(torch, config.dtype), config.weight_memory_bytes
    reading = reading_of(source, weight_dtype, dtype)
    sizes = sizes_of(source.config, reading.kinds, dtype.itemsize)
    if sizes.total <= allowed:
        with reading.opened:
            log.info("--offload auto: %d bytes of weights fit into the %d that they may use", sizes.total, allowed)
        return None
    _check(source.config, sizes, allowed, folder)
    try:
        ops = CpuOps(config.cpu_level, dtype, products_of_kinds(reading.kinds.values()))
    except NotCompiled as error:
        raise UsageError(f"--offload auto: only our kernels compute layers that are read from disk: {error}") from error
    offload = StreamedLayers(ops, folder, sizes.fixed, allowed, config.max_num_seqs)
    try:
        with open_layered(source, reading, dtype, progress) as weights:
            model = Model(
                source.config, weights, backend, config.device, ops, geometry.groups, Outside(offload=offload)
            )
    except BaseException:
        offload.close()
        raise
    if (rows := offload.plan.fill_rows) > config.max_num_batched_tokens:
        log.warning(
            "steps of %d tokens would take no longer than steps of one, and a higher --max-num-batched-tokens than %d "
            "would make prompts faster",
            rows,
            config.max_num_batched_tokens,
        )
    return model


def sizes_of(config: ModelConfig, kinds: Mapping[str, str], item_bytes: int) -> Sizes:
    """What the weights take as they are stored; `kinds`: of the quantized ones. Packed ones may take a little more."""
    fixed, layers = 0, [0] * config.num_layers
    for name, shape in shapes(config).items():
        nbytes = stored_bytes(shape, kinds.get(name), item_bytes)
        _, _, rest = name.partition("layers.")
        index, _, part = rest.partition(".")
        unit = int(index) if part in BEHIND else int(index) - 1 if part in BEFORE else -1
        if not 0 <= unit < config.num_layers or int(index) == config.num_layers:  # the latter: a layer that drafts
            fixed += nbytes
        else:
            layers[unit] += nbytes
    return Sizes(fixed, tuple(layers))


def _check(config: ModelConfig, sizes: Sizes, allowed: int, folder: Path) -> None:
    """Raises UsageError if the layers of this model cannot be read from there."""
    for found, what in (
        (config.num_experts, "experts, of which a pass needs only some: give --expert-parallel-size, or more memory"),
        (config.latent is not None, "a latent in its layers: give more memory, or a narrower --weight-dtype"),
        (config.delta is not None, "states in its layers: give more memory"),
    ):
        if found:
            raise UsageError(f"--offload auto reads dense layers with plain attention only; this model has {what}")
    if (reason := no_room(sizes, allowed)) is not None:
        raise UsageError(reason)
    if (kind := file_system(folder)) in IN_MEMORY:
        raise UsageError(f"--offload-path {folder} lies in memory ({kind}), where layers gain nothing; give a disk")
    place = folder
    while not place.exists():
        place = place.parent
    if (free := shutil.disk_usage(place).free) < sum(sizes.layers):
        raise UsageError(
            f"--offload-path {folder} has {free} bytes of room, and the layers take {sum(sizes.layers)}; give another"
        )
