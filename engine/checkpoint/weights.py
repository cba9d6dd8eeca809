"""load(): a model's weights as tensors under our names, from safetensors, GGUF, or a seed.

    embed                      [vocab_size, hidden]
    layers.{i}.attn_norm       [hidden]
    layers.{i}.q               [num_heads * head_size, hidden]
    layers.{i}.k, .v           [num_kv_heads * head_size, hidden]
    layers.{i}.o               [hidden, num_heads * head_size]
    layers.{i}.mlp_norm        [hidden]
    layers.{i}.gate, .up       [intermediate, hidden]
    layers.{i}.down            [hidden, intermediate]
    norm                       [hidden]
    lm_head                    [vocab_size, hidden]; absent when tied to embed

and, if the configuration requires them:

    layers.{i}.q_bias, .k_bias, .v_bias, .o_bias      [out]
    layers.{i}.q_norm, .k_norm                        [head_size]; joint norms [rows of q], [rows of k]
    layers.{i}.attn_post_norm, .mlp_post_norm         [hidden]
    layers.{i}.router                                 [num_experts, hidden]
    layers.{i}.router_bias                            [num_experts] float32
    layers.{i}.experts.{e}.gate_bias, .up_bias, .down_bias    [out]
    layers.{i}.sinks                                  [num_heads]
    layers.{i}.experts.{e}.gate, .up, .down           as the MLP's, with expert_size for intermediate
    layers.{i}.shared.gate, .up, .down                the same, with shared_size

A latent (engine/model/latent.py) replaces q, k, v, and the inputs of o; without query_rank q stays, with q_b's rows:

    layers.{i}.q_a             [query_rank, hidden]
    layers.{i}.q_a_norm        [query_rank]
    layers.{i}.q_b             [num_heads * (nope_size + rope_size), query_rank]
    layers.{i}.kv_a            [rank + rope_size, hidden]
    layers.{i}.kv_a_norm       [rank]
    layers.{i}.kv_b            [num_heads * (nope_size + value_size), rank]; of a head first K's rows, then V's
    layers.{i}.o               [hidden, num_heads * value_size]

With gates, q has num_heads * head_size more rows behind its own. A layer with a state (engine/model/delta.py) has, in
place of q, k, v and their norms, for Qwen3-Next

    layers.{i}.qkvz            [channels + values, hidden]
    layers.{i}.ba              [2 * value_heads, hidden]
    layers.{i}.conv            [channels, 1, kernel]
    layers.{i}.log_decay, .dt  [value_heads] float32
    layers.{i}.delta_norm      [value_size]
    layers.{i}.o               [hidden, values]

for Kimi Linear, whose decays are [1, 1, value_heads, 1] and whose dt is [keys],

    layers.{i}.q, .k, .v                   [keys or values, hidden]
    layers.{i}.q_conv, .k_conv, .v_conv    [keys or values, 1, kernel]
    layers.{i}.b                           [value_heads, hidden]
    layers.{i}.f_a, .f_b                   [key_size, hidden], [keys, key_size]
    layers.{i}.g_a, .g_b                   [value_size, hidden], [values, value_size]

and a gate of the shared expert is layers.{i}.shared_router [1, hidden].

The layer that drafts (engine/model/draft_layer.py), i = num_layers, has further

    layers.{i}.enorm, .hnorm, .head_norm   [hidden]
    layers.{i}.eh                          [hidden, 2 * hidden]

Rows of q and k are in Hugging Face's half-split RoPE order for every file format; if only some elements of a head are
rotated, in that of row_order.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.checkpoint.byte_weights import ByteWeights
from engine.checkpoint.gguf.weights import GGUFWeights
from engine.checkpoint.hf_quantization import ByteQuantization, Mxfp4Quantization
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.mxfp4_weights import Mxfp4Weights
from engine.checkpoint.packed_weights import PackedWeights
from engine.checkpoint.safetensors_weights import SafetensorsWeights
from engine.checkpoint.weight_cache import WeightCache
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.parallel import Shard

EXACT = ("router_bias", "log_decay", "dt")
"""Weights that stay in float32: the differences between these numbers are what counts."""

EMBED_STD = 0.02
"""Of dummy embeddings; other dummy matrices have std 1 / sqrt(in), which keeps activations near 1 at any size."""


class Reader(Protocol):
    """A source of tensors. Several threads call `read`, once per name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all weights by our name; weights without one of our names keep their own."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in any floating type."""


R = TypeVar("R", bound=Reader)
W = TypeVar("W")


def load(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
    cache: WeightCache | None = None,
    opened: AbstractContextManager[Reader] | None = None,
) -> dict[str, Tensor]:
    """All weights in `dtype` on `device`, contiguous. With `shard`, one rank's parts of them; with `opened`, from there
    instead of the source's files.

    `progress(done, total)` counts bytes in `dtype`, of whole weights, and runs in the calling thread. Weights converted
    from GGUF are kept in `cache`, unless there is a shard. Raises ModelError if a weight is missing, unknown, misshapen
    or unreadable."""
    if opened is not None or cache is None or source.format != "gguf":
        return _load(source, opened or _open(source), dtype, device, progress, shard)
    entry = cache.entry(source.path, dtype)
    if (kept := cache.load(entry)) is not None:
        return _load(source, nullcontext(KeptWeights(kept)), dtype, device, progress, shard)
    weights = _load(source, _open(source), dtype, device, progress, shard)
    if shard is None and cache.entry(source.path, dtype) == entry:  # otherwise the file was replaced meanwhile
        cache.save(entry, weights)
    return weights


def _load(
    source: ModelSource,
    opened: AbstractContextManager[Reader],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None,
    shard: Shard | None,
) -> dict[str, Tensor]:
    def take(reader: Reader, name: str) -> Tensor:
        whole = reader.read(name)
        part = whole if shard is None else shard.cut(name, whole).clone()  # frees the rest of `whole`
        return part.to(device=device, dtype=type_of(name, dtype)).contiguous()

    weights = read_all(source, opened, take, dtype, progress)
    if shard is not None and source.config.tie_word_embeddings:
        weights["lm_head"] = shard.cut("lm_head", weights["embed"])
    return weights


def read_all(
    source: ModelSource,
    opened: AbstractContextManager[R],
    take: Callable[[R, str], W],
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
    only: Callable[[str], bool] = lambda name: True,
) -> dict[str, W]:
    """What `take` makes of every weight, or of those that `only` chooses, in several threads. `progress` as load has
    it. Raises ModelError."""
    wanted, weights = shapes(source.config), {}
    with opened as reader, ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
        check(source, wanted, reader)
        wanted = {name: shape for name, shape in wanted.items() if only(name)}
        done, total = 0, dtype.itemsize * sum(math.prod(shape) for shape in wanted.values())
        for name, weight in zip(wanted, threads.map(lambda name: take(reader, name), wanted), strict=True):
            weights[name] = weight
            done += dtype.itemsize * math.prod(wanted[name])
            if progress is not None:
                progress(done, total)
    return weights


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model, in the order of the forward pass."""
    hidden, vocab = config.hidden_size, config.vocab_size
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), **_attention(config), "mlp_norm": (hidden,)}
    if config.no_input_norms:
        layer = _attention(config)
    with_state = {"attn_norm": (hidden,), **_delta(config), "mlp_norm": (hidden,)}
    biased = (*("qkv" if config.qkv_bias else ""), *("o" if config.o_bias else ""))
    layer |= {f"{name}_bias": layer[name][:1] for name in biased}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    if config.joint_qk_norm:
        layer |= {f"{name}_norm": layer[name][:1] for name in "qk"}
    if config.sinks:
        layer["sinks"] = (config.num_heads,)
    if config.post_norms:
        layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    dense = _mlp("", hidden, config.intermediate_size)
    sparse: dict[str, tuple[int, ...]] = {"router": (config.num_experts, hidden)}
    if config.expert_biases or (config.routing is not None and config.routing.biased):
        sparse["router_bias"] = (config.num_experts,)
    for expert in range(config.num_experts):
        matrices = _mlp(f"experts.{expert}.", hidden, config.expert_size)
        sparse |= matrices
        if config.expert_biases:
            sparse |= {f"{name}_bias": shape[:1] for name, shape in matrices.items()}
    if config.shared_size:
        sparse |= _mlp("shared.", hidden, config.shared_size)
    if config.shared_gate:
        sparse["shared_router"] = (1, hidden)
    layers = {
        f"layers.{i}.{name}": shape
        for i in range(config.loaded_layers)
        for name, shape in (
            (with_state if config.has_state(i) else layer) | (sparse if config.has_experts(i) else dense)
        ).items()
    }
    for i in range(config.num_layers, config.loaded_layers):
        norms = {f"layers.{i}.{name}": (hidden,) for name in ("enorm", "hnorm", "head_norm")}
        layers |= {f"layers.{i}.eh": (hidden, 2 * hidden), **norms}
    head = {} if config.tie_word_embeddings else {"lm_head": (vocab, hidden)}
    return {"embed": (vocab, hidden), **layers, "norm": (hidden,), **head}


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, latent = config.hidden_size, config.latent
    if latent is None:
        q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        return {"q": (q * (1 + config.gated), hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    heads, rank, query_rank = config.num_heads, latent.rank, latent.query_rank
    q = heads * latent.query_size
    query: dict[str, tuple[int, ...]] = {"q": (q, hidden)}
    if query_rank:
        query = {"q_a": (query_rank, hidden), "q_a_norm": (query_rank,), "q_b": (q, query_rank)}
    return query | {
        "kv_a": (latent.row_size, hidden),
        "kv_a_norm": (rank,),
        "kv_b": (heads * (latent.nope_size + latent.value_size), rank),
        "o": (hidden, heads * latent.value_size),
    }


def _delta(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of a layer with a state; empty for a model without."""
    hidden, delta = config.hidden_size, config.delta
    if delta is None:
        return {}
    if delta.by_channel:
        rows = {"q": delta.keys, "k": delta.keys, "v": delta.values}
        return {
            **{name: (count, hidden) for name, count in rows.items()},
            "b": (delta.value_heads, hidden),
            "f_a": (delta.key_size, hidden),
            "f_b": (delta.keys, delta.key_size),
            "g_a": (delta.value_size, hidden),
            "g_b": (delta.values, delta.value_size),
            **{f"{name}_conv": (count, 1, delta.kernel) for name, count in rows.items()},
            "log_decay": (1, 1, delta.value_heads, 1),
            "dt": (delta.keys,),
            "delta_norm": (delta.value_size,),
            "o": (hidden, delta.values),
        }
    return {
        "qkvz": (delta.channels + delta.values, hidden),
        "ba": (2 * delta.value_heads, hidden),
        "conv": (delta.channels, 1, delta.kernel),
        "log_decay": (delta.value_heads,),
        "dt": (delta.value_heads,),
        "delta_norm": (delta.value_size,),
        "o": (hidden, delta.values),
    }


def type_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a weight of a model in `dtype`."""
    return torch.float32 if name.rpartition(".")[2] in EXACT else dtype


class KeptWeights:
    """Tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _mlp(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {prefix + "gate": (size, hidden), prefix + "up": (size, hidden), prefix + "down": (hidden, size)}


class DummyWeights:
    """Normal random numbers that depend only on the seed and the tensor's name; norms are neutral, biases, sinks, and
    the decays and steps of states zero."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = shapes(config)
        self._norm = torch.zeros if config.norm_plus_one else torch.ones
        self._seed = seed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            if name.endswith(("_bias", ".sinks", ".log_decay", ".dt")):
                return torch.zeros(shape)
            return torch.ones(shape) if name.endswith(".delta_norm") else self._norm(shape)
        digest = blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        std = EMBED_STD if name == "embed" else shape[1] ** -0.5
        return torch.randn(shape, generator=random) * std


def open_weights(source: ModelSource, dtype: torch.dtype, cache: WeightCache | None) -> AbstractContextManager[Reader]:
    """The weights of `source`, one by one: from `cache` in `dtype` if it has them, else from the files. Raises
    ModelError."""
    if cache is not None and source.format == "gguf":
        kept = cache.load(cache.entry(source.path, dtype))
        if kept is not None:
            return nullcontext(KeptWeights(kept))
    return _open(source)


def _open(source: ModelSource) -> AbstractContextManager[Reader]:
    if source.format == "dummy":
        return nullcontext(DummyWeights(source.config, source.seed))
    if source.format == "gguf":
        return GGUFWeights(source.path, source.config)
    if source.format == "pooled":
        raise ModelError(
            f"{source.name} has no weight files, and the cluster's pooled store does not have its weights: start a "
            "node with --weights-from-store that has them, or give --model a directory with them"
        )
    return open_quantized(source) or SafetensorsWeights(source.files, source.config)


def open_quantized(source: ModelSource) -> PackedWeights | ByteWeights | Mxfp4Weights | None:
    """A Hugging Face directory whose config.json has a quantization_config; None if it has none. Raises ModelError."""
    if source.quantization is not None and source.config.delta is not None:
        raise ModelError(f"{source.name}: quantization_config in config.json is not supported for models with states")
    if isinstance(source.quantization, ByteQuantization):
        return ByteWeights(source.files, source.config, source.quantization)
    if isinstance(source.quantization, Mxfp4Quantization):
        return Mxfp4Weights(source.files, source.config, source.quantization)
    if source.quantization is not None:
        return PackedWeights(source.files, source.config, source.quantization)
    return None


def check(source: ModelSource, wanted: Mapping[str, tuple[int, ...]], reader: Reader) -> None:
    """Refuse missing, unknown and misshapen weights: ignoring an unknown weight is as wrong as lacking one, unless it
    is a bias that adds nothing."""
    found = reader.shapes()
    if missing := [name for name in wanted if name not in found]:
        last = source.config.num_layers
        if source.config.draft_layers and all(name.startswith(f"layers.{last}.") for name in missing):
            raise ModelError(
                f"--speculative-method mtp: {source.name} lacks {len(missing)} weights of its layer {last}, which "
                f"drafts ({', '.join(missing[:3])} ...); choose another method"
            )
        raise ModelError(f"{source.name} lacks {len(missing)} weights: {', '.join(missing[:3])} ...")
    unknown = [name for name in found if name not in wanted and name != "lm_head" and not _adds_nothing(reader, name)]
    if unknown:
        raise ModelError(f"{source.name} has {len(unknown)} weights of another architecture: {', '.join(unknown[:3])}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelError(f"{source.name}: {name} has shape {list(found[name])}, the config says {list(shape)}")
    if "lm_head" in found and "lm_head" not in wanted and not _is_embedding(reader):
        raise ModelError(
            f"{source.name} has a head that is not its embedding, and config.json says tie_word_embeddings true: set "
            "it to false there to compute with that head"
        )


def _adds_nothing(reader: Reader, name: str) -> bool:
    """Whether it is a bias of zeros. AutoGPTQ writes one for every matrix, also of models without biases."""
    return name.endswith("bias") and not bool(reader.read(name).any())


def _is_embedding(reader: Reader) -> bool:
    """Whether a head that is not needed has the values of the embedding, as some programs save it."""
    head, embedding = reader.read("lm_head"), reader.read("embed")
    return head.shape == embedding.shape and torch.equal(head, embedding.to(head.dtype))
