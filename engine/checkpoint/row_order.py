"""Rows of Qwen3-Next's checkpoints in our order: theirs has the rows of one head side by side, ours those of one kind.

    self_attn.q_proj              of each head [q, gate]               all q, then all gates
    linear_attn.in_proj_qkvz      of each key head [q, k, v.., z..]    all q, all k, all v, all z
    linear_attn.in_proj_ba        of each key head [b.., a..]          all b, all a

Only the first rotary_size elements of q and k are rotated, the i-th with the one half of them behind it. Ours is half
a head behind it, as attention/rotary.py wants it, so the elements of each head are in another order, the same for q
and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.model_config import ModelConfig


def reordered(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The weight under our name with its rows in our order. It owns its memory."""
    kind, delta = name.rpartition(".")[2], config.delta
    if kind in ("q", "k", "q_norm", "k_norm"):
        heads, order = weight.unflatten(0, (-1, config.head_size)), rotary_order(config.head_size, config.rope_size)
        if kind == "q":
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


def rotary_order(head_size: int, rotary_size: int) -> Tensor:
    """[head_size] int64: which element of a checkpoint's head is where in ours."""
    turned, half = rotary_size // 2, head_size // 2
    between = rotary_size + half - turned
    element = torch.arange(head_size)
    return torch.cat((element[:turned], element[rotary_size:between], element[turned:rotary_size], element[between:]))
