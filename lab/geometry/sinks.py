"""gpt-oss: every other layer sees a window; experts in MXFP4."""

from __future__ import annotations

from lab.geometry.architecture import Part, Weights
from lab.geometry.families import Family, Json, Types, expert_weights, heads_part, heads_weights, integers, keys, kinds


def parts(config: Json, types: Types) -> tuple[Part, ...]:
    """Raises ModelError."""
    found = kinds(config, ("full_attention", "sliding_attention"), lambda layer: layer % 2 == 0)
    sizes = integers(config, "num_attention_heads num_key_value_heads head_dim")
    made = ((found["full_attention"], 0), (found["sliding_attention"], int(config["sliding_window"])))
    return tuple(heads_part(layers, window, *sizes, types=types) for layers, window in made if layers)


def weights(config: Json) -> Weights:
    """Raises ModelError."""
    layers, hidden, size, routed = integers(config, "num_hidden_layers hidden_size intermediate_size num_local_experts")
    always, experts = heads_weights(config) + routed * hidden, routed * 3 * hidden * size
    return expert_weights(config, layers * always, layers * experts, routed)


SINKS = Family(
    parts,
    weights,
    keys("""
        experts_per_token head_dim initial_context_length intermediate_size layer_types num_local_experts
        sliding_window swiglu_limit
    """),
)
