"""A Llama's forward pass over padded sequences, with gradients: plain torch, for training a draft.

Weights have the names of engine/checkpoint (`layers.3.q`: [outputs, inputs]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from attention.rotary import rotate
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

Weights = Mapping[str, Tensor]


def check_plain(config: ModelConfig) -> None:
    """Raises ModelError if the model is more than a plain Llama."""
    plain = ModelConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        dtype=config.dtype,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
    )
    if config != plain:
        raise ModelError("drafts are cut from plain Llama models only; this model has other layers")


def normalized(x: Tensor, eps: float) -> Tensor:
    """x [..., hidden] with a mean square of 1, in float32: RMS norm without its weight."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def hidden(weights: Weights, config: ModelConfig, tokens: Tensor, num_layers: int) -> Tensor:
    """tokens [B, T], padded at the right -> the residual stream [B, T, hidden] behind the first num_layers layers."""
    half = torch.arange(0, config.head_size, 2, device=tokens.device) / config.head_size
    angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None, None] * config.rope_theta**-half
    x = weights["embed"][tokens]
    for index in range(num_layers):
        of = {name: weights[f"layers.{index}.{name}"] for name in LAYER}
        x = _layer(x, of, config, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    return x


LAYER = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
"""The weights of a layer."""


def _layer(x: Tensor, w: Weights, config: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, hidden]; cos, sin [T, 1, head_size / 2]."""
    size = *x.shape[:2], -1, config.head_size
    h = (normalized(x, config.rms_norm_eps) * w["attn_norm"]).to(x.dtype)
    q, k = (rotate(linear(h, w[name]).view(size), cos, sin) for name in ("q", "k"))
    q, k, v = (part.transpose(1, 2) for part in (q, k, linear(h, w["v"]).view(size)))
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1), w["o"])
    h = (normalized(x, config.rms_norm_eps) * w["mlp_norm"]).to(x.dtype)
    return x + linear(silu(linear(h, w["gate"])) * linear(h, w["up"]), w["down"])
