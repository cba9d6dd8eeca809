"""Resolves 'auto': one function turns the user's flags and the machine's facts into the final Config.

Pure: the machine, the model, the cluster to join and the random suffix are arguments. Some fields may stay 'auto',
because they name a policy instead of a value: `tokenizer` (the model's own), `load_format` (from --model),
`weight_cache` and `calibration_cache` (the user's), `weight_dtype` (by the file and the machine:
engine/loading/weight_type.py), `attention_backend` and `cpu_level` (measured when the model is loaded:
attention/choice/choose.py), `latent_prompts` (for each chunk: engine/model/latent_prompts.py), `transport` (chosen for
each peer), `prefix_fetch` (for each prefix), `rdma_devices` (all devices when a peer first asks), `speculative_length`
(for each step), `tcp_congestion` (for each peer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from cache.block import BlockGeometry, encodings, type_bytes
from cache.layer_groups import STATE, LayerGroups, StatePlaces
from cache.tiers.lodging import LODGED_SHARE
from engine.config.beyond import beyond_room, lends
from engine.config.config import NO_MODEL, Config
from engine.config.fits import MiB, check_disk, check_memory
from engine.config.flags import UsageError
from engine.config.forms import check_conversion, differs, with_cluster_form
from engine.config.machine import Gpu, Machine
from engine.config.shape import ModelSizes, cluster_geometry, geometry
from sched.beyond import Room

GiB = 1 << 30

CPU_KV_BYTES = 2 * GiB
"""KV of about 90,000 tokens of the embedded model in bfloat16; more would leave a laptop too little memory."""

DRAM_SHARE_BYTES = GiB

KV_STAGING_BYTES = 16 * MiB

WEIGHTS_RESERVE_BYTES = GiB
"""Reserved for activations and the process itself when the memory of weights follows from free memory."""

GPU_RESERVE_BYTES = GiB
"""Reserved for activations and the allocator's slack when the KV arena is sized from GPU memory."""

OTHER_FILES = 256
"""Open files of a node in addition to its clients' connections: those to its peers, logs, weights, the SSD tier."""

RANK_RESERVE_BYTES = GiB
"""Reserved in addition with several GPUs: NCCL's buffers, and rank 0's context on every other GPU."""


def resolve(
    config: Config,
    model: ModelSizes,
    machine: Machine,
    suffix: str,
    cluster: Mapping[str, Any] | None = None,
    draft: ModelSizes | None = None,
    weight_file_bytes: int = 0,
) -> Config:
    """A Config without 'auto' (see the module). `suffix` makes node_id unique. `cluster`: the answer to GET /cluster of
    the node to join; a joining node adopts its dtype of KV, because block keys depend on it. `draft`: the draft model's
    configuration, if there is one. `weight_file_bytes`: the size of the files with weights; 0 = unknown. Raises
    UsageError."""
    device = _device(config, machine)
    if config.computes:
        _check_ranks(config.tensor_parallel_size, model, machine.gpu if device == "cuda" else None)
        _check_experts(config, model)
    dtype = _dtype(config, machine, device, cluster)
    kv_dtype = _kv_dtype(config, dtype, cluster)
    config = with_cluster_form(config, kv_dtype, model.head_size, config.computes, cluster)
    kv_dtype, cluster_dtype = config.kv_cache_dtype, config.cluster_kv_dtype
    config = replace(
        config,
        pool_dtype=_encoding("--pool-dtype", config.pool_dtype, cluster_dtype, cluster),
        wire_dtype=_encoding("--wire-dtype", config.wire_dtype, cluster_dtype, cluster),
        weight_dtype=_weight_dtype(config, machine, device, dtype),
    )
    for flag, encoding in (("--pool-dtype", config.pool_dtype), ("--wire-dtype", config.wire_dtype)):
        if device == "cuda" and encoding != cluster_dtype:
            raise UsageError(f"{flag} {encoding}: only a CPU encodes blocks; use --device cpu, or leave it on auto")
    shape, pooled = geometry(config, model, kv_dtype), cluster_geometry(config, model)
    check_conversion(config, device, shape.groups is not None)
    block_bytes = shape.block_bytes
    weight_bytes = _weight_bytes(config, model, dtype, weight_file_bytes)
    kv_bytes = _kv_cache_bytes(config, model, machine, device, weight_bytes) // block_bytes * block_bytes
    resolved = replace(
        config,
        node_id=f"{config.role.replace(',', '+')}-{suffix}" if config.node_id == "auto" else config.node_id,
        served_model_name=_model_name(config, cluster),
        device=device,
        dtype=dtype,
        num_threads=config.num_threads or machine.num_cpus,
        max_connections=_max_connections(config, machine),
        kv_cache_bytes=kv_bytes,
        dram_bytes=_dram_bytes(config, machine, pooled.pool_bytes),
        kv_staging_bytes=_kv_staging_bytes(config, shape, pooled),
    )
    resolved = replace(resolved, speculative_kv_bytes=_speculative_kv_bytes(resolved, draft, machine, block_bytes))
    resolved = replace(resolved, weight_memory_bytes=_weight_memory_bytes(resolved, machine))
    check_memory(resolved, machine)
    check_disk(resolved, machine)
    lends(resolved, shape)
    return replace(resolved, max_model_len=_max_model_len(resolved, model, shape))


def _max_connections(config: Config, machine: Machine) -> int:
    """--max-connections, limited by the open files that this process may have. Raises UsageError if not even one
    connection is possible."""
    room = machine.max_files - OTHER_FILES
    if room < 1:
        raise UsageError(
            f"--max-connections {config.max_connections}: this process may have {machine.max_files} open files, and "
            f"needs {OTHER_FILES} in addition to its clients' connections; raise the limit (ulimit -n)"
        )
    return min(config.max_connections, room)


def _check_ranks(ranks: int, model: ModelSizes, gpu: Gpu | None) -> None:
    """gpu: None on the CPU."""
    if reason := model.indivisible(ranks):
        raise UsageError(f"--tensor-parallel-size {ranks}: {reason}")
    if gpu is not None and ranks > gpu.count:
        raise UsageError(
            f"--tensor-parallel-size {ranks}: every rank needs its own GPU, and torch sees {gpu.count} here; "
            "give as many or fewer, or --device cpu"
        )


def _check_experts(config: Config, model: ModelSizes) -> None:
    ranks, least, redundant = config.expert_parallel_size, config.expert_replicas, config.num_redundant_experts
    if ranks > 1 and (reason := model.unshareable(ranks, least, redundant)):
        raise UsageError(f"--expert-parallel-size {ranks}: {reason}")


def _device(config: Config, machine: Machine) -> str:
    if config.device == "cuda" and machine.gpu is None and config.computes:
        raise UsageError("--device cuda: torch sees no NVIDIA GPU here; use --device cpu, or install a CUDA build")
    if config.device == "auto":
        wanted = machine.gpu and config.computes and config.expert_parallel_size == 1
        return "cuda" if wanted else "cpu"
    return config.device


def _dtype(config: Config, machine: Machine, device: str, cluster: Mapping[str, Any] | None) -> str:
    if config.model == NO_MODEL:
        return "bfloat16"  # engine.checkpoint.model_source.no_model assumes the same
    if config.dtype != "auto":
        return config.dtype
    if cluster is not None and cluster["dtype"] not in encodings:
        return str(cluster["dtype"])
    return _native_dtype(machine, device)


def _native_dtype(machine: Machine, device: str) -> str:
    bfloat16 = machine.gpu.bfloat16 if device == "cuda" and machine.gpu else machine.bfloat16
    return "bfloat16" if bfloat16 else "float32"


def _weight_dtype(config: Config, machine: Machine, device: str, dtype: str) -> str:
    """--weight-dtype; instead of auto `wide` where quantized weights cannot be computed, or the cluster's first node
    named a type of computation."""
    plain = config.tensor_parallel_size == config.expert_parallel_size == 1 and not config.weights_from_store
    if config.weight_dtype != "auto" or (plain and dtype == _native_dtype(machine, device)):
        return config.weight_dtype
    return "wide"


def _kv_dtype(config: Config, dtype: str, cluster: Mapping[str, Any] | None) -> str:
    """The given dtype; or the cluster's if that is quantized; or the model's compute dtype."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return str(cluster["dtype"]) if cluster is not None and cluster["dtype"] in encodings else dtype


def _encoding(flag: str, wanted: str, kv_dtype: str, cluster: Mapping[str, Any] | None) -> str:
    """The dtype that a flag with the value `wanted` means: the given one, or the cluster's, or the arena's. Blocks of a
    quantized arena stay as they are."""
    if kv_dtype in encodings:
        if wanted not in ("auto", kv_dtype):
            where = "the pool keeps" if flag == "--pool-dtype" else "decode nodes get"
            raise UsageError(
                f"{flag} {wanted}: with --kv-cache-dtype {kv_dtype} {where} the arena's blocks as they are; leave out "
                "one of the two"
            )
        return kv_dtype
    if wanted != "auto":
        return wanted
    name = flag.removeprefix("--").replace("-", "_")
    return kv_dtype if cluster is None else str(cluster.get(name, kv_dtype))


def _kv_staging_bytes(config: Config, shape: BlockGeometry, pooled: BlockGeometry) -> int:
    """Room for two concurrent calls of at least one block each, and the same again."""
    each, kind = shape.encoded_bytes, "encoded"
    if differs(config):
        each, kind = shape.block_size // pooled.block_size * max(pooled.pool_bytes, pooled.encoded_bytes), "converted"
    least, wanted = 4 * each, config.kv_staging_bytes
    if wanted == -1:
        return max(KV_STAGING_BYTES, least)
    if wanted < least and (pooled.encoded or shape.wire_encoded or differs(config)):
        raise UsageError(
            f"--kv-staging-bytes {wanted} holds fewer than 4 {kind} blocks of {each} bytes; leave it on auto or give "
            f"{least} or more"
        )
    return wanted


def _model_name(config: Config, cluster: Mapping[str, Any] | None) -> str:
    """A joining node adopts the name of the cluster: a client may ask any node."""
    if config.served_model_name != "auto":
        return config.served_model_name
    if cluster is not None and "model" in cluster:
        return str(cluster["model"])
    path = PurePath(config.model)
    return path.stem if path.suffix == ".gguf" else path.name


def _weight_bytes(config: Config, model: ModelSizes, dtype: str, weight_file_bytes: int) -> int:
    """At most what the weights take on a GPU. Those that stay as stored take the bytes of their files; rounding while
    loading gives at most q8_0, and fp8 leaves the vocabulary as it is."""
    wide = model.num_parameters * type_bytes[dtype]
    if config.weight_dtype in ("int8", "int4", "mxfp4"):
        return min(wide, model.num_parameters * 34 // 32)
    kept = config.weight_dtype in ("auto", "stored") and config.attention_backend in ("auto", "triton")
    return min(wide, weight_file_bytes) if kept and weight_file_bytes else wide


def _kv_cache_bytes(config: Config, model: ModelSizes, machine: Machine, device: str, weight_bytes: int) -> int:
    if not config.computes:
        return 0
    if config.kv_cache_bytes != -1:
        return config.kv_cache_bytes
    if device == "cpu" or machine.gpu is None:
        return min(CPU_KV_BYTES, machine.free_bytes // 8)
    gpu, ranks = machine.gpu, config.tensor_parallel_size
    weights = weight_bytes // ranks
    used = gpu.total_bytes - gpu.free_bytes
    reserve = GPU_RESERVE_BYTES + (RANK_RESERVE_BYTES if ranks > 1 else 0)
    left = int(config.gpu_memory_utilization * gpu.total_bytes) - used - weights - reserve
    if left <= 0:
        raise UsageError(
            f"no GPU memory is left for KV: {gpu.total_bytes // MiB} MiB in all, {used // MiB} MiB in use, "
            f"{weights // MiB} MiB of weights; raise --gpu-memory-utilization or free memory"
        )
    return left * min(ranks, model.num_kv_heads)  # with more ranks than KV heads, some ranks keep the same KV


def _weight_memory_bytes(config: Config, machine: Machine) -> int:
    """--weight-memory-bytes of a config whose arenas are resolved. Raises UsageError where no layer is streamed."""
    if config.offload == "auto" and config.device != "cpu" and config.computes:
        raise UsageError(
            f"--offload auto reads layers into the memory of a CPU, not with --device {config.device}; give --device "
            "cpu, or leave it out"
        )
    if config.weight_memory_bytes > machine.total_bytes:
        raise UsageError(
            f"--weight-memory-bytes {config.weight_memory_bytes}: this machine (or its cgroup) has "
            f"{machine.total_bytes // MiB} MiB; give less, or leave it on auto"
        )
    if config.weight_memory_bytes != -1:
        return config.weight_memory_bytes
    others = config.kv_cache_bytes, config.speculative_kv_bytes, config.dram_bytes, config.kv_staging_bytes
    return max(1, machine.free_bytes - sum(others) - WEIGHTS_RESERVE_BYTES)


def _speculative_kv_bytes(config: Config, draft: ModelSizes | None, machine: Machine, block_bytes: int) -> int:
    """Bytes of whole blocks of the draft model; 0 without one."""
    if draft is None or not config.computes:
        return 0
    own = geometry(config, draft, config.dtype).block_bytes
    wanted = config.speculative_kv_bytes
    if wanted == -1:
        wanted = max(own, min(config.kv_cache_bytes // block_bytes * own, machine.free_bytes // 16))
    if wanted < own:
        raise UsageError(f"--speculative-kv-bytes {wanted} holds no block of the draft model; give {own} or more")
    return wanted // own * own


def _dram_bytes(config: Config, machine: Machine, block_bytes: int) -> int:
    """Bytes of whole blocks. The SSD tier also needs a DRAM share: blocks are staged there. A mixed node may have none;
    a node whose role names the store would store nothing."""
    wanted = config.dram_bytes
    if wanted == -1:
        beyond = config.beyond_memory == "on" and "decode" in config.roles
        lent = config.attention_elsewhere != "off"
        shares = "store" in config.roles or config.ssd_path is not None or beyond or lent
        wanted = max(block_bytes, min(DRAM_SHARE_BYTES, machine.free_bytes // 4)) if shares else 0
    must = config.ssd_path is not None or ("store" in config.roles and "mixed" not in config.role)
    if wanted < block_bytes and (wanted or must):
        raise UsageError(
            f"--dram-bytes {wanted} holds no block of {block_bytes} bytes, and a store node or --ssd-path "
            "needs some; leave it on auto or give more"
        )
    return wanted // block_bytes * block_bytes


def _max_model_len(config: Config, model: ModelSizes, shape: BlockGeometry) -> int:
    """At most the model's maximum, and the capacity of this node's KV arena, or with --beyond-memory that of its tier
    too."""
    wanted, most = config.max_model_len, model.max_position_embeddings
    if wanted > most:
        raise UsageError(f"--max-model-len {wanted} exceeds the model's {most} tokens; give {most} or less")
    if not config.computes:
        return wanted or most
    held, room = arena_tokens(config, shape), beyond_room(config, shape)
    if room is not None and any(model.windows):
        raise UsageError(
            "--beyond-memory on does not work with a model whose layers see a window, and whose old KV leaves the "
            "arena anyway; leave it out"
        )
    if room is not None:
        elsewhere = wanted if config.attention_elsewhere != "off" else 0  # what others lend shows when it is asked for
        held = max(held, room.tokens, elsewhere)
    elif config.beyond_memory == "on":
        held = max(held, most)  # it accepts them for the decode nodes
    if held < (wanted or 1):
        blocks = peak_blocks(-(-(wanted or 1) // config.block_size), shape.groups, config)
        beyond = "" if room is None else f", or --dram-bytes {_tier_bytes(wanted, room)}"
        raise UsageError(
            f"the KV arena {'holds' if room is None else 'and the tiers beyond it hold'} {held} tokens, fewer than "
            f"--max-model-len {wanted or 'auto'}; give --kv-cache-bytes {blocks * shape.block_bytes}{beyond} or more"
        )
    return wanted or min(most, held)


def arena_tokens(config: Config, shape: BlockGeometry) -> int:
    """Longest prompt + output whose KV the arena holds."""
    return longest(config.kv_cache_bytes // shape.block_bytes, shape.groups, config) * config.block_size


def context_tokens(config: Config, shape: BlockGeometry) -> int:
    """Longest prompt + output of a request in the arena, once `config` is resolved."""
    return min(config.max_model_len, arena_tokens(config, shape))


def _tier_bytes(tokens: int, room: Room) -> int:
    """--dram-bytes with which a request beyond memory may have `tokens` tokens."""
    return int(room.cold_of(tokens) / LODGED_SHARE + 1) * room.block_bytes


def peak_blocks(blocks: int, groups: LayerGroups | None, config: Config) -> int:
    """Blocks of the arena that a prompt of `blocks` blocks of tokens takes while it is computed."""
    if groups is None:
        return blocks
    size, step_tokens = config.block_size, config.max_num_batched_tokens
    states = StatePlaces(size, config.state_interval).most(step_tokens)
    most = (
        states if window == STATE else -(-(window or blocks * size) // size) - (-step_tokens // size) + 2
        for window in groups.windows
    )
    return sum(blocks if not window else min(blocks, each) for window, each in zip(groups.windows, most, strict=True))


def longest(num_blocks: int, groups: LayerGroups | None, config: Config) -> int:
    """The most blocks of tokens whose peak_blocks an arena of `num_blocks` has."""
    low, high = 0, num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak_blocks(middle, groups, config) <= num_blocks else (low, middle - 1)
    return low
