"""Rows of checkpoints in our order, where it is another: of Qwen3-Next and GLM-4.

Qwen3-Next has the rows of one head side by side, ours those of one kind:

    self_attn.q_proj              of each head [q, gate]               all q, then all gates
    linear_attn.in_proj_qkvz      of each key head [q, k, v.., z..]    all q, all k, all v, all z
    linear_attn.in_proj_ba        of each key head [b.., a..]          all b, all a

Of both, only the first rotary_size elements of q and k are rotated: in Qwen3-Next the i-th with the one half of them
behind it, in GLM-4 with its neighbour. Ours is half a head behind it, as attention/rotary.py wants it, so the elements
of each head are in another order, the same for q and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.model_config import ModelConfig


def reordered(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The weight under our name with its rows in our order. It owns its memory."""
    kind, delta = name.rpartition(".")[2], config.delta
    if kind in ("q", "k", "q_norm", "k_norm", "q_bias", "k_bias"):
        heads = weight.unflatten(0, (-1, config.head_size))
        order = rotary_order(config.head_size, config.rope_size, config.interleaved)
        if kind == "q" and config.gated:
            return torch.cat((heads[0::2, order].flatten(0, 1), heads[1::2].flatten(0, 1)))  # a gate is a value's
        ordered: Tensor = heads[:, order].flatten(0, 1)
        return ordered
    if delta is not None and kind in ("qkvz", "ba"):
        each = delta.value_heads // delta.key_heads
        values = each * delta.value_size
        sizes = [delta.key_size, delta.key_size, values, values] if kind == "qkvz" else [each, each]
        parts = weight.unflatten(0, (delta.key_heads, -1)).split(sizes, 1)
        return torch.cat([part.flatten(0, 1) for part in parts])
    return weight


def rotary_order(head_size: int, rotary_size: int, interleaved: bool = False) -> Tensor:
    """[head_size] int64: which element of a checkpoint's head is where in ours."""
    turned, half = rotary_size // 2, head_size // 2
    between = rotary_size + half - turned
    element = torch.arange(head_size)
    pairs = element[:rotary_size].view(-1, 2).T if interleaved else element[:rotary_size].view(2, -1)
    return torch.cat((pairs[0], element[rotary_size:between], pairs[1], element[between:]))
