"""Tiny random models of every family: built and saved by transformers, to be loaded by our own reader.

Sizes are odd on purpose where a family allows it: a window shorter than the prompts, a head size that is not
hidden_size / heads, more experts than a step has tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from attention.choice.choose import choose
from cache.block import PLANES
from engine.checkpoint import weights
from engine.checkpoint.model_source import ModelSource, describe
from engine.model.decoder import Model
from engine.step.runner import Runner
from tests.engine.tiny_llama import BLOCK_SIZE

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
V3 = LATENT | {"num_nextn_predict_layers": 0, "n_shared_experts": 1, "routed_scaling_factor": 2.5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 20, "num_key_value_heads": 1}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2-window-yarn": ("Qwen2", {"head_dim": None, "rope_parameters": YARN, **QWEN_WINDOW}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", QWEN_WINDOW | {"attention_bias": True}),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window": ("Mixtral", EXPERTS | {"sliding_window": 20, "num_local_experts": 3, "intermediate_size": 50}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 48, "num_experts_per_tok": 3}),
    "qwen3moe-mixed": (
        "Qwen3Moe",
        EXPERTS
        | {"moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "qwen2moe": (
        "Qwen2Moe",
        {"head_dim": None, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "phi3": ("Phi3", {"head_dim": None}),
    "phi3-window": ("Phi3", {"head_dim": None, "sliding_window": 20, "num_key_value_heads": 4}),
    "glm4": ("Glm4", {"attention_bias": True, "head_dim": 24, "partial_rotary_factor": 0.5}),
    "glm4-group": (
        "Glm4",
        {"attention_bias": False, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "olmo2-tied": ("Olmo2", {"head_dim": None, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {"head_dim": None, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}
        | {"logits_scaling": 2.0, "residual_multiplier": 0.7, "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 48}),
    "gemma2-caps": (
        "Gemma2",
        {
            "sliding_window": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": 20, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "head_dim": 16,
            "swiglu_limit": 2.0,
            "rope_parameters": YARN | {"factor": 32.0, "rope_theta": 1.5e5, "truncate": False},
        },
    ),
    "deepseek2-lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.0}),
    "deepseek2": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 4.0}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek3": (
        "DeepseekV3",
        V3
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "kimi-k2": (
        "DeepseekV3",
        V3
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 2, "q_lora_rank": None}
        | {"rope_parameters": YARN | {"factor": 32.0, "rope_theta": 5e4, "beta_fast": 1.0, "mscale_all_dim": 1.0}}
        | {"rope_interleave": False, "norm_topk_prob": False},
    ),
}
"""Our name of the case -> (transformers' prefix, changes to SIZES)."""

NEXT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", NEXT),
    "qwen3-next-dense": (
        "Qwen3Next",
        NEXT
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_only_layers": [0, 1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "linear_value_head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""The same for families whose layers keep states: their KV pool is not that of `ours`."""


def save(name: str, directory: Path, shard: str = "1GB", **more: Any) -> PreTrainedModel:
    """The family's model in float32 as transformers made and saved it; norms and biases random too. `more` replaces
    values of its configuration."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    prefix, changes = (FAMILIES | WITH_STATES)[name]
    kind = "Gemma3Text" if prefix == "Gemma3" else prefix
    sizes = {key: value for key, value in (SIZES | changes | more).items() if key != "head_dim" or value is not None}
    config = getattr(transformers, kind + "Config")(
        **sizes, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith(("bias", "sinks")):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif parameter_name.endswith("A_log"):
            torch.nn.init.normal_(parameter, -3, 0.5)  # a state that lasts for tens of tokens
        elif "embed" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.15)  # transformers leaves the routers at zero
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def ours(
    directory: Path, dtype: torch.dtype = torch.float32, backend: str = "torch", latent_prompts: str = "auto"
) -> tuple[ModelSource, Runner]:
    """The saved model by our loader; its KV pool starts as NaN."""
    source = describe(str(directory))
    config, attention = source.config, choose(backend, "cpu", sinks=source.config.sinks)
    if config.latent is not None:
        config = replace(config, latent=replace(config.latent, prompts=latent_prompts))
    model = Model(config, weights.load(source, dtype), attention)
    return source, Runner(model, empty_pool(source, dtype), BLOCK_SIZE)


def empty_pool(source: ModelSource, dtype: torch.dtype, num_blocks: int = 64) -> Tensor:
    config = source.config
    shape = (num_blocks, config.kv_layers, PLANES[config.kv_kind], config.num_kv_heads, BLOCK_SIZE, config.head_size)
    return torch.full(shape, torch.nan, dtype=dtype)
