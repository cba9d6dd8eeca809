"""The keys of config.json that only Kimi Linear has -> fields of ModelConfig.

Layers with a decay for each channel (engine/model/delta.py), and every fourth one with DeepSeek's attention, without
positions; the experts are DeepSeek-V3's, under other names. transformers writes the lists of layers in its own way, and
the published checkpoints have them under `linear_attn_config`, counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.delta_config import Delta
from engine.model.experts.routing_config import Routing
from engine.model.latent_config import Latent
from engine.model.model_config import check

Json = Mapping[str, Any]

IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "use_grouped_topk": (True,),
}
"""As hf_config.IMPLEMENTED."""

DEFAULTS: dict[str, Any] = {"num_shared_experts": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446}
"""As Family.defaults."""

KINDS = ("linear_attention", "full_attention")
MLP_KINDS = ("dense", "sparse")


def fields(config: Json) -> dict[str, Any]:
    published = dict(config.get("linear_attn_config") or {})
    layers, size = range(int(config["num_hidden_layers"])), int(config["moe_intermediate_size"])
    head = int(published.get("head_dim") or config["linear_head_dim"])
    heads = int(published.get("num_heads") or config["linear_num_heads"])
    latent = Latent(
        rank=int(config["kv_lora_rank"]),
        rope_size=int(config["qk_rope_head_dim"]),
        nope_size=int(config["qk_nope_head_dim"]),
        value_size=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        rotated=False,
    )
    return {
        "max_position_embeddings": int(config["model_max_length"]),
        "delta": Delta(
            layers=_with_state(config, published, layers),
            key_heads=heads,
            key_size=head,
            value_heads=heads,
            value_size=head,
            kernel=int(published.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]),
            by_channel=True,
        ),
        "latent": latent,
        "num_kv_heads": 1,
        "head_size": latent.row_size,
        "num_experts": int(config["num_experts"]),
        "experts_per_token": int(config["num_experts_per_token"]),
        "expert_size": size,
        "normalize_experts": bool(config.get("moe_renormalize", True)),
        "dense_layers": _dense(config, layers),
        "routing": Routing(
            scoring="sigmoid",
            biased=True,
            groups=int(config.get("num_expert_group") or 1),
            groups_per_token=int(config.get("topk_group") or 1),
            group_score="top2",
            scale=float(config.get("routed_scaling_factor", 1.0)),
        ),
        "shared_size": size * int(config.get("num_shared_experts") or 0),
        "num_draft_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def _with_state(config: Json, published: Json, layers: range) -> tuple[int, ...]:
    if "kda_layers" in published:
        found = sorted(int(layer) - 1 for layer in published["kda_layers"])
        full = sorted(int(layer) - 1 for layer in published.get("full_attn_layers") or ())
        fits = sorted(found + full) == list(layers)
        check(fits, f"linear_attn_config in config.json has {len(found) + len(full)} of {len(layers)} layers")
        return tuple(found)
    types = config["layer_types"]
    unknown = sorted(set(types) - set(KINDS))
    check(not unknown, f"layer_types {', '.join(unknown)} in config.json is not supported")
    check(len(types) == len(layers), f"layer_types in config.json has {len(types)} entries for {len(layers)} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == KINDS[0])


def _dense(config: Json, layers: range) -> tuple[int, ...]:
    types = config.get("mlp_layer_types")
    if types is None:
        return tuple(layers[: int(config.get("first_k_dense_replace", 1))])
    unknown = sorted(set(types) - set(MLP_KINDS))
    check(not unknown, f"mlp_layer_types {', '.join(unknown)} in config.json is not supported")
    return tuple(layer for layer, kind in enumerate(types) if kind == MLP_KINDS[0])
