"""From a model source and a Config to a runner over an empty KV arena. Blocking: runs in a thread at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attention import choose
from cache.block import BlockGeometry
from engine.config import Config
from engine.draft import DraftModel
from engine.model import Model
from engine.model_source import ModelSource
from engine.resolve import geometry
from engine.runner import Runner
from engine.service import KV_REGION
from engine.weight_cache import WeightCache
from engine.weights import load
from net.memory import Region


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    region: Region  # the KV arena
    eos_token_ids: tuple[int, ...]
    draft: DraftModel | None = None


def load_model(
    config: Config,
    kv_geometry: BlockGeometry,
    source: ModelSource,
    draft: ModelSource | None,
    progress: Callable[[int, int], None],
) -> LoadedModel:
    """`draft`: the draft model, if there is one. `progress(done, total)` in bytes of weights of the model served,
    called from this thread."""
    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)
    weights = load(source, getattr(torch, config.dtype), config.device, progress, weight_cache(config))
    model = Model(source.config, weights, choose(config.attention_backend, config.device), config.device)
    region = Region.shared(KV_REGION, config.kv_cache_bytes)
    kv = torch.frombuffer(region.memory, dtype=getattr(torch, kv_geometry.dtype)).view(-1, *kv_geometry.shape)
    runner = Runner(model, kv, kv_geometry.block_size, config.device)
    drafts = None if draft is None else _load_draft(config, draft)
    return LoadedModel(runner, region, source.config.eos_token_ids, drafts)


def _load_draft(config: Config, source: ModelSource) -> DraftModel:
    """Its KV stays in this process: plain memory, never registered for transfers."""
    weights = load(source, getattr(torch, config.dtype), config.device, None, weight_cache(config))
    model = Model(source.config, weights, choose(config.attention_backend, config.device), config.device)
    shape = geometry(config, source.config, config.dtype)
    num_blocks = config.speculative_kv_bytes // shape.block_bytes
    kv = torch.zeros(num_blocks, *shape.shape, dtype=model.dtype, device=config.device)
    return DraftModel(Runner(model, kv, config.block_size, config.device), config.speculative_acceptance == "rejection")


def weight_cache(config: Config) -> WeightCache | None:
    """The cache that --weight-cache names."""
    if config.weight_cache == "off":
        return None
    if config.weight_cache != "auto":
        return WeightCache(Path(config.weight_cache).expanduser())
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return WeightCache(Path(user).expanduser() / "mooncake" / "weights")
