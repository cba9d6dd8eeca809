"""The keys of config.json that only Qwen3-Next has -> fields of ModelConfig.

Three layers of four keep a state (engine/model/delta.py), the fourth has attention whose output is gated.
engine/checkpoint/row_order.py has the order of rows in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.delta_config import Delta
from engine.model.model_config import check

Json = Mapping[str, Any]

IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "use_sliding_window": (False,),
}
"""As hf_config.IMPLEMENTED."""

KINDS = ("linear_attention", "full_attention")


def rotary_size(config: Json) -> int:
    """Elements of a head that are rotated, by the factor in either place."""
    rope: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return int(int(config["head_dim"]) * float(rope.get("partial_rotary_factor", config["partial_rotary_factor"])))


def fields(config: Json) -> dict[str, Any]:
    layers, every = range(int(config["num_hidden_layers"])), int(config.get("full_attention_interval") or 4)
    types = config.get("layer_types") or [KINDS[(layer + 1) % every == 0] for layer in layers]
    unknown = sorted(set(types) - set(KINDS))
    check(not unknown, f"layer_types {', '.join(unknown)} in config.json is not supported")
    check(len(types) == len(layers), f"layer_types in config.json has {len(types)} entries for {len(layers)} layers")
    return {
        "delta": Delta(
            layers=tuple(layer for layer, kind in enumerate(types) if kind == KINDS[0]),
            key_heads=int(config["linear_num_key_heads"]),
            key_size=int(config["linear_key_head_dim"]),
            value_heads=int(config["linear_num_value_heads"]),
            value_size=int(config["linear_value_head_dim"]),
            kernel=int(config["linear_conv_kernel_dim"]),
        ),
        "rotary_size": rotary_size(config),
        "shared_size": int(config["shared_expert_intermediate_size"]) if int(config["num_experts"]) else 0,
    }
