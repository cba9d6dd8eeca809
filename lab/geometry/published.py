"""Configurations of published models, a row each.

A row has the keys of the checkpoint's config.json that decide about KV and weights; lab/geometry/read_config.py reads
it as it reads the file itself. To add a model, add a row with its source; a test compares its number of parameters
with the published one (tests/lab/geometry/test_geometry.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """`source`: the checkpoint or file whose config.json this is."""

    name: str
    source: str
    config: Mapping[str, Any]


PUBLISHED = (
    Model(
        "Llama-3-70B",
        "meta-llama/Meta-Llama-3-70B",
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    ),
    Model(
        "Llama-3-8B",
        "meta-llama/Meta-Llama-3-8B",
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    ),
    Model(
        "DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
            "vocab_size": 129280,
            "quantization_config": {"quant_method": "fp8"},
        },
    ),
    Model(
        "Kimi-K2",
        "moonshotai/Kimi-K2-Instruct",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
            "quantization_config": {"quant_method": "fp8"},
        },
    ),
    Model(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        {
            "architectures": ["GptOssForCausalLM"],
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
    Model(
        "Gemma-3-27B",
        "google/gemma-3-27b-it, text_config",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 21504,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
            "vocab_size": 262208,
            "torch_dtype": "bfloat16",
        },
    ),
    Model(
        "Qwen3-Next-80B",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "vocab_size": 151936,
            "torch_dtype": "bfloat16",
        },
    ),
    Model(
        "Kimi-Linear-48B",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        {
            "architectures": ["KimiLinearForCausalLM"],
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [layer for layer in range(1, 27) if layer % 4],
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 1,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "model_max_length": 1048576,
            "vocab_size": 163840,
            "torch_dtype": "bfloat16",
        },
    ),
    Model(
        "SmolLM2-135M",
        "HuggingFaceTB/SmolLM2-135M-Instruct, the embedded model",
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    ),
)
