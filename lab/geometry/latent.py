"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: one latent row per token for all heads (MLA, arXiv 2405.04434).

FLOPs of attention, 2 for a product and its sum, for each token that one token sees:

    prefill    2 heads (nope + rope + v)     after the row was expanded to K and V of the heads
    decode     2 heads (2 rank + rope)       on the row itself: K and V are absorbed into the query and the answer

The expansion of a known prefix for each chunk is not counted: it is a twentieth of a chunk's attention at 8,192 tokens.
"""

from __future__ import annotations

from cache.groups import Group
from engine.model.model_config import check
from lab.geometry.architecture import Part, Weights
from lab.geometry.families import Family, Json, Types, expert_weights, integers, keys

ROWS = "num_hidden_layers num_attention_heads kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"


def parts(config: Json, types: Types) -> tuple[Part, ...]:
    layers, heads, rank, rope, nope, value = integers(config, ROWS)
    if types.mtp:
        layers += min(1, int(config.get("num_nextn_predict_layers") or 0))
    return (
        Part(
            group=Group(kind="latent", layers=layers, row_bytes=(rank + rope) * types.kv_bytes),
            prefill_flops=2.0 * heads * (nope + rope + value),
            decode_flops=2.0 * heads * (2 * rank + rope),
            uniform_row_bytes=heads * (nope + rope + value) * types.kv_bytes,
        ),
    )


def weights(config: Json) -> Weights:
    """Raises ModelError."""
    check(int(config.get("moe_layer_freq", 1)) == 1, "moe_layer_freq in config.json is not supported; only 1 is")
    layers, heads, rank, rope, nope, value = integers(config, ROWS)
    hidden, query_rank = int(config["hidden_size"]), int(config.get("q_lora_rank") or 0)
    of_query = heads * (nope + rope)
    query = query_rank * (hidden + of_query) if query_rank else hidden * of_query
    attention = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    routed = int(config.get("n_routed_experts") or 0)
    sparse = layers - int(config["first_k_dense_replace"]) if routed else 0
    expert = 3 * hidden * int(config["moe_intermediate_size"]) if routed else 0
    always = sparse * (int(config.get("n_shared_experts") or 0) * expert + routed * hidden)
    dense = (layers - sparse) * 3 * hidden * int(config["intermediate_size"])
    return expert_weights(config, layers * attention + always + dense, sparse * routed * expert, routed)


LATENT = Family(
    parts,
    weights,
    keys(f"""
        {ROWS} aux_loss_alpha ep_size first_k_dense_replace intermediate_size moe_intermediate_size moe_layer_freq
        n_group n_routed_experts n_shared_experts num_nextn_predict_layers pretraining_tp q_lora_rank
        routed_scaling_factor scoring_func seq_aux topk_group topk_method
    """),
)
