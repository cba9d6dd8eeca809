"""Builds a runner over an empty KV arena from a model source and a Config. Blocking: runs in a thread at start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.choice.choose import choose
from attention.codes import pool_in
from attention.interface import AttentionBackend
from cache.block import BlockGeometry
from engine.checkpoint.eagle_weights import load_head
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.pooled_weights import PooledWeights
from engine.checkpoint.quantized_weights import load_quantized
from engine.checkpoint.weight_cache import WeightCache
from engine.checkpoint.weights import Reader, load, open_weights
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.shape import geometry as geometry_of
from engine.core.kv_ready import KV_REGION
from engine.experts.loading import load_rest
from engine.experts.processes import ExpertProcesses
from engine.loading import rank_arenas
from engine.loading.cuda_memory import CudaMemory
from engine.loading.offload_model import load_offloaded
from engine.loading.rank_processes import RankProcesses
from engine.loading.shared_memory import shared_memory
from engine.loading.weight_type import weight_type
from engine.model.decoder import Model, Outside
from engine.model.eagle import eagle_layer
from engine.model.graphs import CudaRecorder, obstacle
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.choice import choose_ops
from engine.model.ops.interface import Ops
from engine.model.ops.quantized import Products, products_of
from engine.model.parallel import Ranks, Shard
from engine.sampling.logit_rules import Masks
from engine.speculation.draft import DraftModel
from engine.speculation.layer_drafts import LayerDrafts
from engine.step.runner import Runner
from net.compiled import NotCompiled
from net.rounds.door import Door
from net.transfer.common.memory import Region
from net.transfer.device.staging import DeviceRegion

log = logging.getLogger("mooncake.engine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    region: Region | DeviceRegion  # the KV arena
    eos_token_ids: tuple[int, ...]
    processes: RankProcesses | ExpertProcesses | None  # of the other ranks
    draft: DraftModel | LayerDrafts | None = None
    weight_dtype: str = "wide"  # --weight-dtype, not auto


def load_model(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    draft: ModelSource | None,
    progress: Callable[[int, int], None],
    masks: Masks | None,
    find_pooled: Callable[[], PooledWeights | None] | None = None,
    agreed: str | None = None,
    expert_door: Door | None = None,
) -> LoadedModel:
    """`draft`: the draft model, if there is one. `progress(done, total)` in bytes of weights of the model served,
    called from this thread. `masks`: of requests with a grammar. `find_pooled`: where to look for the weights first.
    `agreed`: the cluster's --weight-dtype, for auto. `expert_door`: where ranks with experts join, if it is open
    already. Raises ModelError, UsageError."""
    torch.set_num_threads(threads_of_rank(config))  # before anything is measured, for the draft model too
    torch.set_grad_enabled(False)
    drafts = _drafts(config, source) if draft is None else _load_draft(config, draft)
    if config.tensor_parallel_size > 1:
        return _load_ranks(config, geometry, source, drafts, progress, masks)
    region, kv = arena(config, geometry)
    if config.expert_parallel_size > 1:
        return _load_experts(config, geometry, source, drafts, progress, masks, (region, kv), expert_door)
    backend = _backend(config, source.config, geometry.dtype)
    settled = config
    if config.weight_dtype == "auto":
        found = weight_type(source, backend.name, getattr(torch, config.dtype), config.cpu_level, agreed)
        settled = replace(config, weight_dtype=found)
    load_alone = partial(
        load_rank, settled, geometry, source, kv, progress=progress, make=partial(Runner, masks=masks), backend=backend
    )
    opened = None if find_pooled is None else find_pooled()
    if opened is not None:
        log.info("loading the weights from the pooled store")
    try:
        runner = load_alone(opened=opened)
    except ModelError as error:
        if opened is None or source.format == "pooled":
            raise
        log.warning("%s. Loading the weights from disk instead.", error)
        runner = load_alone()
    record_graphs(config, runner)
    return LoadedModel(runner, region, source.config.eos_token_ids, None, drafts, settled.weight_dtype)


def _load_ranks(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    drafts: DraftModel | LayerDrafts | None,
    progress: Callable[[int, int], None],
    masks: Masks | None,
) -> LoadedModel:
    """As rank 0, together with the other ranks."""
    size = config.tensor_parallel_size
    shards = [Shard(source.config, rank, size) for rank in range(size)]
    region: Region | DeviceRegion | None = None
    if splits_arena(config):
        part = rank_arenas.own_part(geometry, config.kv_cache_bytes // geometry.block_bytes, shards[0])
        kv = rank_arenas.pool_of(part, geometry, shards[0])
        processes = RankProcesses(config, geometry, source, None)
    else:
        region = shared_memory("--kv-cache-bytes", KV_REGION, config.kv_cache_bytes)
        kv = blocks_in(region, geometry)[:, :, :, shards[0].kv_heads]
        processes = RankProcesses(config, geometry, source, region)
    try:
        make = partial(Runner, masks=masks, around_forward=processes.step)
        runner = load_rank(config, geometry, source, kv, 0, processes.join, progress, make=make)
        if region is None:
            region = rank_arenas.whole_arena([part, *processes.parts], geometry, shards)
    except BaseException:
        processes.close()
        raise
    record_graphs(config, runner)
    return LoadedModel(runner, region, source.config.eos_token_ids, processes, drafts)


def _load_experts(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    drafts: DraftModel | LayerDrafts | None,
    progress: Callable[[int, int], None],
    masks: Masks | None,
    made: tuple[Region | DeviceRegion, Tensor],
    door: Door | None,
) -> LoadedModel:
    """As rank 0 of ranks that share the experts, or without any of them. `made`: the arena."""
    region, kv = made
    source = as_flagged(config, source)
    dtype = getattr(torch, config.dtype)
    try:
        processes = ExpertProcesses(config, source, door)
    except OSError as error:
        raise UsageError(f"--expert-parallel-size {config.expert_parallel_size}: no shared memory: {error}") from error
    try:
        cache = weight_cache(config)
        weights = load_rest(source, dtype, cache, progress)
        processes.fill_own(cache)
        backend = _backend(config, source.config, geometry.dtype)
        group = processes.join()
        ops = _ops(config, backend, dtype)
        others = Outside(experts=group)
        model = Model(source.config, weights, backend, config.device, ops, geometry.groups, others)
        runner = Runner(model, kv, geometry.block_size, config.device, masks=masks, around_forward=group.step)
    except BaseException:
        processes.close()
        raise
    return LoadedModel(runner, region, source.config.eos_token_ids, processes, drafts)


def splits_arena(config: Config) -> bool:
    """Whether every rank keeps the KV of its heads in memory of its own."""
    return config.device == "cuda"


def threads_of_rank(config: Config) -> int:
    """Of --num-threads, those of each rank on this machine."""
    experts = config.expert_parallel_size - config.expert_remote_ranks
    return max(1, config.num_threads // max(config.tensor_parallel_size, experts))


def device_of(config: Config, rank: int) -> str:
    """Of one rank among several."""
    return f"cuda:{rank}" if config.device == "cuda" else config.device


def arena(config: Config, geometry: BlockGeometry) -> tuple[Region | DeviceRegion, Tensor]:
    """The KV arena, empty, and the same memory as a tensor [num_blocks, *geometry.shape]. Raises UsageError if the
    kernel refuses the memory."""
    if config.device == "cpu":
        region = shared_memory("--kv-cache-bytes", KV_REGION, config.kv_cache_bytes)
        return region, blocks_in(region, geometry)
    num_blocks = config.kv_cache_bytes // geometry.block_bytes
    memory = torch.zeros(num_blocks * geometry.block_bytes, dtype=torch.uint8, device=config.device)
    return DeviceRegion(KV_REGION, CudaMemory(memory)), pool_in(memory, geometry.shape, geometry.dtype)


def blocks_in(region: Region, geometry: BlockGeometry) -> Tensor:
    """[num_blocks, *geometry.shape], the region's own memory."""
    return pool_in(torch.frombuffer(region.memory, dtype=torch.uint8), geometry.shape, geometry.dtype)


def record_graphs(config: Config, runner: Runner) -> None:
    """Small steps by CUDA graphs from now on, where they can be had; the log says why not."""
    if config.device == "cpu" or config.enforce_eager:
        return
    if (reason := obstacle(runner.model)) is not None:
        log.info("no CUDA graphs: %s", reason)
        return
    drafts = 0 if config.speculative_method == "none" else config.num_speculative_tokens
    runner.record(CudaRecorder(), config.max_num_seqs, config.max_model_len, drafts)


def load_rank(
    config: Config,
    geometry: BlockGeometry,
    source: ModelSource,
    kv: Tensor,
    rank: int = 0,
    join: Callable[[], Ranks] | None = None,
    progress: Callable[[int, int], None] | None = None,
    opened: PooledWeights | None = None,
    make: Callable[[Model, Tensor, int, str], Runner] = Runner,
    backend: AttentionBackend | None = None,
) -> Runner:
    """One rank's runner: its weights, and `kv`, its heads of the arena's blocks. `join` connects the ranks and is
    called once the weights are there; None = there is one rank, with everything. `make` makes the runner. `backend`:
    of attention; None = as `config` says. --weight-dtype is not auto."""
    source = as_flagged(config, source)
    device = config.device if join is None else device_of(config, rank)
    torch.set_num_threads(threads_of_rank(config))
    torch.set_grad_enabled(False)
    shard = None if join is None else Shard(source.config, rank, config.tensor_parallel_size)
    dtype = getattr(torch, config.dtype)
    if backend is None:
        backend = _backend(config, source.config if shard is None else shard.config, geometry.dtype)
    if config.offload == "auto":
        folder, tell = offload_folder(config), progress or (lambda done, total: None)
        offloaded = load_offloaded(config, geometry, source, backend, config.weight_dtype, folder, tell)
        if offloaded is not None:
            return make(offloaded, kv, geometry.block_size, device)
    if config.weight_dtype != "wide":
        weights: dict[str, Any] = load_quantized(source, config.weight_dtype, dtype, progress)
    else:
        weights = load(
            source,
            dtype,
            device,
            progress,
            shard,
            weight_cache(config),
            None if opened is None else nullcontext(opened),
        )
    model = Model(
        source.config if shard is None else shard.config,
        weights,
        backend,
        device,
        _ops(config, backend, dtype, products_of(weights.values())),
        geometry.groups,
        None if join is None else Outside(join()),
    )
    if source.config.eagle is not None:
        head = load_head(source, dtype, device)
        model.draft = eagle_layer(source.config.eagle, head, source.config, model.ops, model.device)
    return make(model, kv, geometry.block_size, device)


def _drafts(config: Config, source: ModelSource) -> LayerDrafts | None:
    """What drafts with a layer whose KV is in the blocks of the served model."""
    if source.config.kv_layers == source.config.num_layers or "decode" not in config.roles:
        return None
    return LayerDrafts(config.speculative_acceptance == "rejection", source.config.max_position_embeddings)


def _load_draft(config: Config, source: ModelSource) -> DraftModel:
    """On this rank alone. Its KV stays in this process: plain memory, never registered for transfers."""
    dtype = getattr(torch, config.dtype)
    weights = load(source, dtype, config.device, cache=weight_cache(config))
    backend = _backend(config, source.config, config.dtype)
    ops = _ops(config, backend, dtype)
    model = Model(source.config, weights, backend, config.device, ops)
    shape = geometry_of(replace(config, kv_groups="uniform"), source.config, config.dtype)
    num_blocks = config.speculative_kv_bytes // shape.block_bytes
    kv = torch.zeros(num_blocks, *shape.shape, dtype=model.dtype, device=config.device)
    return DraftModel(Runner(model, kv, config.block_size, config.device), config.speculative_acceptance == "rejection")


def as_flagged(config: Config, source: ModelSource) -> ModelSource:
    """With the form of latent prompts that the user chose."""
    latent = source.config.latent
    if latent is None:
        return source
    return replace(source, config=replace(source.config, latent=replace(latent, prompts=config.latent_prompts)))


def _backend(config: Config, model: ModelConfig, kv_dtype: str) -> AttentionBackend:
    """For one rank, whose heads `model` has."""
    try:
        return choose(
            config.attention_backend,
            config.device,
            model.head_size,
            kv_dtype,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            rank=0 if model.latent is None else model.latent.rank,
            dtype=getattr(torch, config.dtype),
            cpu_level=config.cpu_level,
            sinks=model.sinks,
        )
    except ValueError as error:  # not on this device, not installed, or no such file
        raise UsageError(str(error)) from error


def _ops(config: Config, backend: AttentionBackend, dtype: torch.dtype, products: Products = "elements") -> Ops:
    try:
        return choose_ops(backend.name, config.device, dtype, config.cpu_level, products)
    except NotCompiled as error:  # a level by name, or no kernels for quantized weights
        flag = f"--weight-dtype {config.weight_dtype}: " if products != "elements" else ""
        raise UsageError(flag + str(error)) from error


def weight_cache(config: Config) -> WeightCache | None:
    """The cache that --weight-cache names."""
    return None if config.weight_cache == "off" else WeightCache(_cache_folder(config))


def offload_folder(config: Config) -> Path:
    """--offload-path, or the folder of the weight cache."""
    return _cache_folder(config) if config.offload_path is None else Path(config.offload_path).expanduser()


def _cache_folder(config: Config) -> Path:
    if config.weight_cache not in ("auto", "off"):
        return Path(config.weight_cache).expanduser()
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user).expanduser() / "mooncake" / "weights"


def weights_of(config: Config, source: ModelSource) -> AbstractContextManager[Reader]:
    """The weights that this node serves, one by one, for others. Raises ModelError."""
    return open_weights(source, getattr(torch, config.dtype), weight_cache(config))
