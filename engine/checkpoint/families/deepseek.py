"""The keys of config.json that only DeepSeek-V2, DeepSeek-V3 (R1, Kimi-K2, Moonlight) have -> fields of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.experts.routing_config import Routing
from engine.model.latent_config import Latent
from engine.model.model_config import check
from engine.model.rope_scaling import mscale

Json = Mapping[str, Any]

V2_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "norm_topk_prob": (False,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
}
V3_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""As hf_config.IMPLEMENTED."""

V3_DEFAULTS: dict[str, Any] = {"n_group": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "topk_group": 4}
"""As Family.defaults."""


def deepseek_v2(config: Json) -> dict[str, Any]:
    """Group-limited greedy routing if topk_method says so; q of DeepSeek-V2-Lite has no latent."""
    limited = config.get("topk_method") == "group_limited_greedy"
    routing = Routing(
        groups=int(config.get("n_group") or 1) if limited else 1,
        groups_per_token=int(config.get("topk_group") or 1) if limited else 1,
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    return _latent(config, interleaved=True) | _experts(config, routing, first_dense=0) | {"normalize_experts": False}


def deepseek_v3(config: Json) -> dict[str, Any]:
    """Sigmoid scores, and a bias that balances the load without a loss (noaux_tc)."""
    routing = Routing(
        scoring="sigmoid",
        biased=True,
        groups=int(config.get("n_group") or 1),
        groups_per_token=int(config.get("topk_group") or 1),
        group_score="top2",
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    latent = _latent(config, interleaved=bool(config.get("rope_interleave", True)))
    normalize = bool(config.get("norm_topk_prob", True))
    return latent | _experts(config, routing, first_dense=3) | {"normalize_experts": normalize}


def _latent(config: Json, interleaved: bool) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check(isinstance(rope, Mapping), f"rope_scaling {rope!r} in config.json is not an object")
    scaled = rope.get("type", rope.get("rope_type", "default")) != "default" and rope.get("mscale_all_dim")
    latent = Latent(
        rank=int(config["kv_lora_rank"]),
        rope_size=int(config["qk_rope_head_dim"]),
        nope_size=int(config["qk_nope_head_dim"]),
        value_size=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        interleaved=interleaved,
        sharpness=mscale(float(rope["factor"]), float(scaled)) ** 2 if scaled else 1.0,
    )
    return {"latent": latent, "num_kv_heads": 1, "head_size": latent.row_size}


def _experts(config: Json, routing: Routing, first_dense: int) -> dict[str, Any]:
    dense, size = int(config.get("first_k_dense_replace", first_dense)), int(config["moe_intermediate_size"])
    return {
        "num_experts": int(config["n_routed_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_size": size,
        "dense_layers": tuple(range(min(dense, int(config["num_hidden_layers"])))),
        "routing": routing,
        "shared_size": size * int(config.get("n_shared_experts") or 0),
        "num_draft_layers": int(config.get("num_nextn_predict_layers") or 0),
    }
