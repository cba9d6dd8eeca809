"""Builds a runner with other weights over the arena of a running one. Blocking: runs in a thread of its own.

The new model computes with the same operations and the same attention, and shares the arena. Only its weights take
memory.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.named_weights import NamedWeights
from engine.checkpoint.quantized_weights import load_quantized
from engine.checkpoint.weights import load, shapes
from engine.config.config import Config
from engine.config.machine import free_bytes
from engine.loading.load_model import as_flagged
from engine.model.decoder import Model
from engine.model.model_error import ModelError
from engine.step.runner import Runner

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class NewWeights:
    """`key`: what the content of the weights hashes to; `read_s`: for reading and converting, of `seconds` in all."""

    key: bytes
    runner: Runner
    nbytes: int
    read_s: float
    seconds: float


def obstacle(config: Config) -> str | None:
    """Why a node with this configuration cannot replace its weights while it serves; None if it can."""
    if config.device != "cpu":
        return f"weights are replaced on CPUs only, not with --device {config.device}: start it with another --model"
    if config.tensor_parallel_size > 1:
        return (
            f"weights are replaced on one rank only, not with --tensor-parallel-size {config.tensor_parallel_size}: "
            "start it with another --model"
        )
    if config.expert_parallel_size > 1:
        return (
            f"weights are replaced on one rank only, not with --expert-parallel-size {config.expert_parallel_size}: "
            "start it with another --model"
        )
    if config.offload != "none":
        return (
            f"weights are replaced in memory only, not with --offload {config.offload}: start it with another --model"
        )
    return None


def load_new_weights(config: Config, source: ModelSource, opened: NamedWeights, running: Runner) -> NewWeights:
    """Raises ModelError if there is no memory for them next to the old ones, or a tensor cannot be read."""
    begun, dtype, source = time.monotonic(), getattr(torch, config.dtype), as_flagged(config, source)
    nbytes = dtype.itemsize * sum(map(math.prod, shapes(source.config).values()))
    if (free := free_bytes()) < nbytes:
        raise ModelError(
            f"the new weights need {nbytes / GiB:.2f} GiB of memory next to the old ones, and {free / GiB:.2f} GiB are "
            "free: lower --kv-cache-bytes or --dram-bytes"
        )
    with torch.no_grad():
        weights: dict[str, Any]
        if config.weight_dtype in ("auto", "wide", "stored"):  # what a trainer puts is wide, whatever the file was
            weights = load(source, dtype, config.device, opened=opened.opened())
        else:
            weights = load_quantized(source, config.weight_dtype, dtype, opened=opened.opened())
        read = time.monotonic()
        model = Model(
            source.config, weights, running.model.backend, config.device, running.model.ops, groups=running.model.groups
        )
    if source.config.eagle is not None:
        model.draft = running.model.draft  # the head stays as it is
    return NewWeights(opened.key(), running.with_model(model), nbytes, read - begun, time.monotonic() - begun)
