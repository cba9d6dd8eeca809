"""from_hf(): config.json of a Hugging Face directory -> ModelConfig.

A family is an entry of FAMILIES: facts that its config.json omits because the architecture's code contains them. A key
that would change the mathematics but is not implemented is refused here, with one line that names the key, before any
weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.families import kimi_linear, qwen3_next
from engine.checkpoint.families.deepseek import V2_IMPLEMENTED, V3_DEFAULTS, V3_IMPLEMENTED, deepseek_v2, deepseek_v3
from engine.model.model_config import ModelConfig, check, token_ids
from engine.model.model_error import ModelError

Json = Mapping[str, Any]


def no_windows(config: Json) -> tuple[int, ...]:
    return ()


def all_layers(config: Json) -> tuple[int, ...]:
    """Mistral: one window for every layer, or none."""
    check(len(set(config.get("layer_types") or ())) <= 1, "layer_types in config.json differ, which is not supported")
    return (int(config["sliding_window"]),) * int(config["num_hidden_layers"]) if config.get("sliding_window") else ()


def all_layers_if_used(config: Json) -> tuple[int, ...]:
    return all_layers(config) if config.get("use_sliding_window", False) else ()


def upper_layers_if_used(config: Json) -> tuple[int, ...]:
    """Qwen: the layers from max_window_layers on, or those that layer_types names."""
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return ()
    first = int(config.get("max_window_layers", 28))
    return _by_type(config, lambda layer: layer >= first)


def every_other(config: Json) -> tuple[int, ...]:
    return _by_type(config, lambda layer: layer % 2 == 0)


def five_of_six(config: Json) -> tuple[int, ...]:
    period = int(config.get("sliding_window_pattern", 6))
    return _by_type(config, lambda layer: (layer + 1) % period != 0)


def _by_type(config: Json, default: Callable[[int], bool]) -> tuple[int, ...]:
    """Windows by layer_types; without layer_types, by the family's rule."""
    names = {True: "sliding_attention", False: "full_attention"}
    layers = range(int(config["num_hidden_layers"]))
    types = config.get("layer_types") or [names[default(layer)] for layer in layers]
    unknown = sorted(set(types) - set(names.values()))
    check(not unknown, f"layer_types {', '.join(unknown)} in config.json is not supported")
    window = int(config.get("sliding_window") or 4096)
    return tuple(window if kind == names[True] else 0 for kind in types)


def gpt_oss(config: Json) -> dict[str, Any]:
    return {"gate_limit": float(config["swiglu_limit"]), "expert_size": int(config["intermediate_size"])}


def granite(config: Json) -> dict[str, Any]:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "score_scale": float(config["attention_multiplier"]),
        "branch_scale": float(config["residual_multiplier"]),
        "logit_divisor": float(config["logits_scaling"]),
    }


def shared_expert(config: Json) -> dict[str, Any]:
    return {"shared_size": int(config["shared_expert_intermediate_size"])}


def glm4(config: Json) -> dict[str, Any]:
    return {"rotary_size": qwen3_next.rotary_size(config)}


def no_more(config: Json) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    windows: Callable[[Json], tuple[int, ...]] = no_windows
    more: Callable[[Json], dict[str, Any]] = no_more
    """Fields from keys that only this family has."""
    implemented: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """In addition to IMPLEMENTED."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that config.json may omit."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """ModelConfig fields that are the same for all models of the family."""


ORIGINAL = "original_max_position_embeddings"

GEMMA_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA_FIXED = {"norm_plus_one": True, "post_norms": True, "activation": "gelu_tanh"}

GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "truncate": False}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows=all_layers, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        windows=all_layers,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        fixed={"normalize_experts": True},
    ),
    "Qwen2ForCausalLM": Family(windows=upper_layers_if_used, fixed={"qkv_bias": True}),
    "Qwen3ForCausalLM": Family(windows=upper_layers_if_used, defaults={"head_dim": 128}, fixed={"qk_norm": True}),
    "Qwen3MoeForCausalLM": Family(
        windows=all_layers_if_used, defaults={"num_experts_per_tok": 8}, fixed={"qk_norm": True}
    ),
    "Qwen2MoeForCausalLM": Family(
        more=shared_expert,
        implemented={"qkv_bias": (True,), "use_sliding_window": (False,)},
        defaults={"num_experts_per_tok": 4},
        fixed={"qkv_bias": True, "shared_gate": True},
    ),
    "GraniteForCausalLM": Family(
        more=granite,
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "Phi3ForCausalLM": Family(windows=all_layers, defaults={"rms_norm_eps": 1e-5}, fixed={"fused": True}),
    "Glm4ForCausalLM": Family(
        more=glm4,
        implemented={"partial_rotary_factor": (0.25, 0.5, 1.0)},
        defaults={"attention_bias": False, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
        fixed={"fused": True, "interleaved": True, "o_bias": False, "post_norms": True},
    ),
    "Olmo2ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5}, fixed={"joint_qk_norm": True, "no_input_norms": True, "post_norms": True}
    ),
    "Gemma2ForCausalLM": Family(
        windows=every_other,
        defaults=GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed=GEMMA_FIXED,
    ),
    "Gemma3ForCausalLM": Family(
        windows=five_of_six,
        defaults=GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        fixed=GEMMA_FIXED | {"qk_norm": True},
    ),
    "GptOssForCausalLM": Family(
        windows=every_other,
        more=gpt_oss,
        implemented={"swiglu_alpha": (1.702,)},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_scaling": GPT_OSS_ROPE,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        fixed={
            "activation": "clamped",
            "expert_biases": True,
            "normalize_experts": True,
            "sinks": True,
            "together": True,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        more=qwen3_next.fields,
        implemented=qwen3_next.IMPLEMENTED,
        defaults={
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "norm_topk_prob": True,
            "num_experts_per_tok": 10,
            "partial_rotary_factor": 0.25,
        },
        fixed={"gated": True, "norm_plus_one": True, "qk_norm": True, "shared_gate": True},
    ),
    "KimiLinearForCausalLM": Family(
        more=kimi_linear.fields, implemented=kimi_linear.IMPLEMENTED, defaults=kimi_linear.DEFAULTS
    ),
    "DeepseekV2ForCausalLM": Family(more=deepseek_v2, implemented=V2_IMPLEMENTED),
    "DeepseekV3ForCausalLM": Family(more=deepseek_v3, implemented=V3_IMPLEMENTED, defaults=V3_DEFAULTS),
}
"""By the names in `architectures` of config.json."""

PARTIAL = "partial_rotary_factor"
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "mlp_bias": (False,),
    PARTIAL: (1.0,),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
}
"""Keys that change the mathematics -> the implemented values; null and a missing key are always accepted."""


def from_hf(config: Json, generation: Json | None = None) -> ModelConfig:
    """The ModelConfig of config.json, with stop tokens also from generation_config.json. Raises ModelError."""
    try:
        family = _family(config)
        config = {**family.defaults, **config}
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        fields: dict[str, Any] = {
            "num_layers": int(config["num_hidden_layers"]),
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_size": int(config.get("head_dim") or hidden // heads),
            "intermediate_size": int(config["intermediate_size"]),
            "vocab_size": int(config["vocab_size"]),
            "windows": family.windows(config),
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "max_position_embeddings": int(config.get("max_position_embeddings", 2048)),
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_ids": token_ids((generation or {}).get("eos_token_id"), config.get("eos_token_id")),
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            "qkv_bias": bool(config.get("attention_bias", False)),
            "o_bias": bool(config.get("attention_bias", False)),
            **_rope(config, family),
            **(_experts(config) if "num_experts_per_tok" in family.defaults else {}),
            **(_gemma(config) if "query_pre_attn_scalar" in family.defaults else {}),
            **family.more(config),
        }
        return ModelConfig(**(fields | dict(family.fixed)))
    except KeyError as error:
        raise ModelError(f"config.json has no {error}: not the configuration of a known model") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json contains an impossible value: {error}") from None


def _family(config: Json) -> Family:
    named = config.get("architectures") or (["LlamaForCausalLM"] if config.get("model_type") == "llama" else [])
    known = next((FAMILIES[name] for name in named if name in FAMILIES), None)
    if known is None:
        raise ModelError(
            f"architecture {', '.join(named) or config.get('model_type')!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    # Gemma's configurations name two activations, and its code reads the second.
    ignored = "hidden_act" if "hidden_activation" in known.defaults else "hidden_activation"
    for key, implemented in (IMPLEMENTED | dict(known.implemented)).items():
        value = config.get(key)
        ok = value is None or value in implemented or key == ignored
        only = f"; only {' or '.join(map(repr, implemented))} is" if implemented else ""
        check(ok, f"{key} {value!r} in config.json is not supported{only}")
    return known


def _rope(config: Json, family: Family) -> dict[str, Any]:
    """Theta and scaling from any of the three forms: one dict, one dict per layer type, or top-level keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    local = float(config.get("rope_local_base_freq", 0.0))
    if "full_attention" in rope:
        windowed = dict(rope.get("sliding_attention") or {})
        check(
            windowed.get("rope_type", "default") == "default",
            f"rope_type {windowed.get('rope_type')!r} of sliding_attention in config.json is not supported",
        )
        local = float(windowed.get("rope_theta", local))
        rope = dict(rope["full_attention"])
    theta = float(rope.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))  # the key before version 4.43 is "type"
    partial, implemented = rope.pop("partial_rotary_factor", 1.0), (IMPLEMENTED | dict(family.implemented))[PARTIAL]
    only = " or ".join(map(str, implemented))
    check(partial in implemented, f"{PARTIAL} {partial} in config.json is not supported; only {only} is")
    if rope["rope_type"] in ("yarn", "llama3") and config.get(ORIGINAL):  # transformers prefers the key at the top
        rope[ORIGINAL] = int(config[ORIGINAL])
    if rope["rope_type"] == "yarn":
        rope.setdefault(ORIGINAL, int(config["max_position_embeddings"]))
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _experts(config: Json) -> dict[str, Any]:
    layers, every = range(int(config["num_hidden_layers"])), int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ()) | {layer for layer in layers if (layer + 1) % every}
    experts = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    return {
        "num_experts": int(experts),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_size": int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        "normalize_experts": bool(config.get("norm_topk_prob", False)),
        "dense_layers": tuple(sorted(dense)),
    }


def _gemma(config: Json) -> dict[str, Any]:
    return {
        "query_scale_size": int(config["query_pre_attn_scalar"]),
        "attention_soft_cap": float(config.get("attn_logit_softcapping") or 0.0),
        "logit_soft_cap": float(config.get("final_logit_softcapping") or 0.0),
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
    }
