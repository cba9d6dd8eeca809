"""Kimi Linear: most layers keep a state, with a decay for each channel (arXiv 2510.26692), the others a latent.

The engine reads its config.json. FLOPs for a token of a state are 7 for each value of its matrix, as for Qwen3-Next
(delta.py).
"""

from __future__ import annotations

from cache.groups import Group
from engine.checkpoint.hf_config import from_hf
from lab.geometry.architecture import Part, Weights
from lab.geometry.families import Family, Json, Types, bytes_of, keys


def parts(config: Json, types: Types) -> tuple[Part, ...]:
    """Raises ModelError."""
    model = from_hf(config)
    delta, latent, heads = model.delta, model.latent, model.num_heads
    assert delta is not None and latent is not None, "a model of this family"
    uniform = heads * (latent.query_size + latent.value_size) * types.kv_bytes
    state_bytes = delta.matrix * types.state_bytes + (delta.kernel - 1) * delta.channels * types.kv_bytes
    return (
        Part(
            group=Group(
                kind="latent",
                layers=model.num_layers - len(delta.layers),
                row_bytes=latent.row_size * types.kv_bytes,
            ),
            prefill_flops=2.0 * heads * (latent.query_size + latent.value_size),
            decode_flops=2.0 * heads * (2 * latent.rank + latent.rope_size),
            uniform_row_bytes=uniform,
        ),
        Part(
            group=Group(kind="state", layers=len(delta.layers), state_bytes=state_bytes),
            prefill_flops=7.0 * delta.matrix,
            decode_flops=7.0 * delta.matrix,
            uniform_row_bytes=uniform,
        ),
    )


def weights(config: Json) -> Weights:
    """Raises ModelError."""
    model = from_hf(config)
    sparse = model.num_layers - len(model.dense_layers)
    experts = sparse * model.num_experts * 3 * model.hidden_size * model.expert_size
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    shared_bytes, expert_bytes = bytes_of(config)
    return Weights(
        shared=model.num_parameters - experts - embedding,
        experts=experts,
        expert_share=model.experts_per_token / model.num_experts,
        embedding=embedding,
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        experts_per_token=model.experts_per_token,
        routed_elements=sparse * model.hidden_size if model.num_experts else 0,
    )


CHANNELS = Family(
    parts,
    weights,
    keys("""
        first_k_dense_replace head_dim intermediate_size kv_lora_rank layer_types linear_attn_config
        linear_conv_kernel_dim linear_head_dim linear_num_heads mla_use_nope mlp_layer_types model_max_length
        moe_intermediate_size moe_layer_freq moe_renormalize moe_router_activation_func num_expert_group num_experts
        num_experts_per_token num_nextn_predict_layers num_shared_experts pretraining_tp q_lora_rank qk_nope_head_dim
        qk_rope_head_dim routed_scaling_factor topk_group use_grouped_topk v_head_dim
    """),
)
