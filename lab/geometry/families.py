"""The common parts of families that the engine does not run: how they are described, and what several of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cache.block import type_bytes
from cache.groups import Group
from engine.model.model_config import check
from lab.geometry.architecture import Part, Weights

Json = Mapping[str, Any]

MXFP4_BYTES = 4.25 / 8
"""Of one value: half a byte, and a byte of scale for 32 values."""


@dataclass(frozen=True, slots=True)
class Types:
    """What is stored of KV: its types, keys of cache.block.type_bytes."""

    kv: str = "bfloat16"
    state: str = "float32"
    mtp: bool = False  # no type: whether the layer that drafts has KV too (--speculative-method mtp)

    @property
    def kv_bytes(self) -> int:
        return type_bytes[self.kv]

    @property
    def state_bytes(self) -> int:
        return type_bytes[self.state]


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture that the engine does not run."""

    parts: Callable[[Json, Types], tuple[Part, ...]]
    weights: Callable[[Json], Weights]
    keys: frozenset[str]  # of config.json, in addition to COMMON


def keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMMON = keys("""
    architectures attention_bias attention_dropout auto_map bos_token_id dtype eos_token_id hidden_act hidden_size
    initializer_range max_position_embeddings model_type norm_topk_prob num_attention_heads num_experts_per_tok
    num_hidden_layers num_key_value_heads output_router_logits pad_token_id quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta router_aux_loss_coef tie_word_embeddings torch_dtype transformers_version
    use_cache vocab_size
""")
"""Keys of any family: they are read, or they change neither KV nor the number of weights."""


def integers(config: Json, names: str) -> list[int]:
    return [int(config[name]) for name in names.split()]


def heads_part(layers: int, window: int, heads: int, kv_heads: int, head_size: int, *, types: Types) -> Part:
    """Layers with K and V per head; window 0: all tokens."""
    row_bytes = 2 * kv_heads * head_size * types.kv_bytes
    group = Group(kind="window" if window else "full", layers=layers, row_bytes=row_bytes, window=window)
    flops = 4.0 * heads * head_size
    return Part(group=group, prefill_flops=flops, decode_flops=flops, uniform_row_bytes=row_bytes)


def heads_weights(config: Json, gated: bool = False) -> int:
    """Parameters of q, k, v and o of one layer; gated: its answer has a gate as large as q."""
    hidden, size, heads, kv_heads = integers(config, "hidden_size head_dim num_attention_heads num_key_value_heads")
    return hidden * size * ((3 if gated else 2) * heads + 2 * kv_heads)


def kinds(config: Json, names: tuple[str, str], second: Callable[[int], bool]) -> Counter[str]:
    """Layers by the names of layer_types. Without layer_types, layers for which `second` holds have the second name.
    Raises ModelError."""
    layers = range(int(config["num_hidden_layers"]))
    types = config.get("layer_types") or [names[second(layer)] for layer in layers]
    unknown = sorted(set(types) - set(names))
    check(not unknown, f"layer_types {', '.join(unknown)} in config.json is not supported")
    check(len(types) == len(layers), f"{len(types)} layer_types in config.json for {len(layers)} layers")
    return Counter(types)


def expert_weights(config: Json, layers: int, experts: int, routed: int) -> Weights:
    """layers: parameters of all layers that every token uses; experts: those of all routed experts, `routed` in a
    layer. Raises ModelError."""
    shared_bytes, expert_bytes = bytes_of(config)
    vocab_size, hidden = integers(config, "vocab_size hidden_size")
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return Weights(
        shared=layers + vocab_size * hidden,
        experts=experts,
        expert_share=int(config["num_experts_per_tok"]) / routed if routed else 0.0,
        embedding=0 if config.get("tie_word_embeddings") else vocab_size * hidden,
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        experts_per_token=int(config["num_experts_per_tok"]) if routed else 0,
        routed_elements=experts // (3 * size * routed) if routed else 0,
    )


def bytes_of(config: Json) -> tuple[float, float]:
    """(bytes of a parameter, of one of a routed expert). Raises ModelError."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "fp8":
        return 1.0, 1.0
    if method == "mxfp4":
        return 2.0, MXFP4_BYTES
    check(method is None, f"quant_method {method!r} in config.json is not supported; fp8 and mxfp4 are")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    check(dtype in type_bytes, f"dtype {dtype!r} in config.json is not one of {', '.join(type_bytes)}")
    return float(type_bytes[dtype]), float(type_bytes[dtype])
