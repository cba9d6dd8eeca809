"""From a model source and a Config to a runner over an empty KV arena. Blocking: runs in a thread at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention import choose
from cache.block import BlockGeometry
from engine.config import Config
from engine.model import Model
from engine.model_source import ModelSource
from engine.ops import choose_ops
from engine.runner import Runner
from engine.service import KV_REGION
from engine.weights import load
from net.memory import Region


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    region: Region  # the KV arena
    eos_token_ids: tuple[int, ...]


def load_model(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    progress: Callable[[int, int], None],
) -> LoadedModel:
    """`progress(done, total)` in bytes of weights, called from this thread."""
    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, config.dtype)
    weights = load(source, dtype, config.device, progress)
    backend = choose(config.attention_backend, config.device)
    model = Model(source.config, weights, backend, config.device, choose_ops(backend.name, config.device, dtype))
    region = Region.shared(KV_REGION, config.kv_cache_bytes)
    kv = torch.frombuffer(region.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
    return LoadedModel(Runner(model, kv, geometry.block_size, config.device), region, source.config.eos_token_ids)
