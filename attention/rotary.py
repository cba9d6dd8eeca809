"""Rotary position embedding, half-split: element i of a head is rotated with element i + head_size / 2.

out[i]        = x[i] cos[i] - x[i + half] sin[i]
out[i + half] = x[i + half] cos[i] + x[i] sin[i]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.interface import RaggedBatch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_size]; cos, sin [T, 1, head_size / 2] of x's dtype -> a new tensor like x."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotateThenWrite:
    """`rotate_and_write_kv` for a backend without a kernel for both together."""

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any) -> None:
        raise NotImplementedError

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any
    ) -> Tensor:
        """See AttentionBackend. cos and sin are rounded to the model's dtype first, as transformers does."""
        num_kv_heads = kv.shape[2]
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        qk = rotate(qk, cos[:, None].to(qkv.dtype), sin[:, None].to(qkv.dtype))
        self.write_kv(qk[:, num_heads:], v, kv, batch, plan)
        return qk[:, :num_heads]
