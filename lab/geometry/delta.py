"""Qwen3-Next: three layers of four keep a state (gated delta rule, arXiv 2412.06464), the fourth K and V per head.

A layer's state: a matrix [v heads, k size, v size], and the last inputs of a convolution over q, k and v. Its FLOPs for
a token are 7 for each value of the matrix: 1 for the decay, 2 each to read, to update, and to answer.
"""

from __future__ import annotations

from collections import Counter

from cache.groups import Group
from engine.model.model_config import check
from lab.geometry.architecture import Part, Weights
from lab.geometry.families import Family, Json, Types, expert_weights, heads_part, heads_weights, integers, keys, kinds

LINEAR = """
    linear_num_key_heads linear_key_head_dim linear_num_value_heads linear_value_head_dim linear_conv_kernel_dim
"""


def layers_of(config: Json) -> Counter[str]:
    every = int(config.get("full_attention_interval", 4))
    return kinds(config, ("full_attention", "linear_attention"), lambda layer: (layer + 1) % every != 0)


def parts(config: Json, types: Types) -> tuple[Part, ...]:
    """Raises ModelError."""
    k_heads, k_size, v_heads, v_size, kernel = integers(config, LINEAR)
    found, sizes = layers_of(config), integers(config, "num_attention_heads num_key_value_heads head_dim")
    channels, matrix = 2 * k_heads * k_size + v_heads * v_size, v_heads * k_size * v_size
    full = heads_part(found["full_attention"], 0, *sizes, types=types)
    state_bytes = matrix * types.state_bytes + (kernel - 1) * channels * types.kv_bytes
    state = Part(
        group=Group(kind="state", layers=found["linear_attention"], state_bytes=state_bytes),
        prefill_flops=7.0 * matrix,
        decode_flops=7.0 * matrix,
        uniform_row_bytes=full.group.row_bytes,
    )
    return full, state


def weights(config: Json) -> Weights:
    """Raises ModelError."""
    check(int(config.get("decoder_sparse_step", 1)) == 1, "decoder_sparse_step in config.json: only 1 is supported")
    check(not config.get("mlp_only_layers"), "mlp_only_layers in config.json: only [] is supported")
    k_heads, k_size, v_heads, v_size, kernel = integers(config, LINEAR)
    layers, hidden, routed = integers(config, "num_hidden_layers hidden_size num_experts")
    channels, answer, found = 2 * k_heads * k_size + v_heads * v_size, v_heads * v_size, layers_of(config)
    # q, k, v and the gate of the answer; the decay and the rate of each head; the convolution; the output
    linear = hidden * (channels + answer) + hidden * 2 * v_heads + channels * kernel + answer * hidden
    attention = found["full_attention"] * heads_weights(config, gated=True) + found["linear_attention"] * linear
    size, shared = integers(config, "moe_intermediate_size shared_expert_intermediate_size")
    always = 3 * hidden * shared + hidden + routed * hidden  # the shared expert, its gate, the router
    return expert_weights(config, attention + layers * always, layers * routed * 3 * hidden * size, routed)


DELTA = Family(
    parts,
    weights,
    keys(f"""
        {LINEAR} decoder_sparse_step full_attention_interval head_dim intermediate_size layer_types mlp_only_layers
        moe_intermediate_size num_experts partial_rotary_factor shared_expert_intermediate_size
    """),
)
