"""Multi-head latent attention: all heads share one row per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    c = norm(x W_DKV) [rank]     p = rope(x W_KR) [rope]     kv_a = [W_DKV | W_KR]
    q_h = [n_h [nope] | rope(r_h) [rope]]                    from x, or from a latent of its own
    k_h = [c W_UK,h | p]         v_h = c W_UV,h              kv_b = [W_UK,h | W_UV,h] per head

What a layer keeps of a token is the row [c | p]. In the absorbed form, a head's query moves to the latent's side, so
that attention has one KV head, whose value is the first part of its key, and keys and values of heads are not computed:

    s_j = [n_h W_UK,h^T | r_h] . [c_j | p_j]                 o_h = (sum_j softmax_j(scale s_j) c_j) W_UV,h

Chunks of prompts for which that is slower have keys and values of heads (latent_prompts.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.interface import RaggedBatch
from attention.latent import attend_latent, write_latent
from attention.rotary import rotate
from engine.model.latent_config import Latent
from engine.model.latent_prompts import LatentPrompts
from engine.model.ops.interface import Linear, Ops, PerHead

NORM_EPS = 1e-6
"""Of the norms of both latents, whatever the model's other norms have."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's attention between its first product, of kv_a and q_a (or q), and its last, o."""

    sizes: Latent
    num_heads: int
    q_norm: Tensor | None  # [query_rank]; None: q is part of the first product
    q_b: Linear | None  # [num_heads * query_size, query_rank]
    norm: Tensor  # [rank]
    to_latent: PerHead  # [T, num_heads, nope_size] -> [T, num_heads, rank], by W_UK
    to_value: PerHead  # [T, num_heads, rank] -> [T, num_heads, value_size], by W_UV transposed
    ops: Ops
    prompts: LatentPrompts

    def __call__(
        self, projected: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """projected [T, query_rank or num_heads * query_size, then rank + rope_size] -> [T, num_heads * value_size];
        writes this step's rows to kv [num_blocks, 1, 1, block_size, rank + rope_size]."""
        sizes, cos, sin = self.sizes, *(angle[:, None] for angle in angles)
        first, row = projected.split((projected.shape[1] - sizes.row_size, sizes.row_size), dim=1)
        if self.q_b is not None and self.q_norm is not None:
            first = self.q_b(self.ops.rms_norm(first, self.q_norm, NORM_EPS))
        q = first.view(len(first), self.num_heads, sizes.query_size)
        nope, rope = q.split((sizes.nope_size, sizes.rope_size), dim=2)
        latent = self.ops.rms_norm(row[:, : sizes.rank], self.norm, NORM_EPS)
        key = self._rotated(row[:, None, sizes.rank :], cos, sin)[:, 0]
        write_latent(self.prompts.backend, torch.cat((latent, key), 1), kv, batch, plan)
        rope, split = self._rotated(rope, cos, sin), self.prompts.split(batch)
        if split is None:
            return self._absorbed(nope, rope, kv, batch, plan)
        out: Tensor = nope.new_empty(len(nope), self.num_heads * sizes.value_size)
        if split.rest is not None:
            rest = split.rest
            out[rest.rows] = self._absorbed(nope[rest.rows], rope[rest.rows], kv, rest.batch, rest.plan)
        for chunk in split.chunks:
            rows = nope[chunk.rows], rope[chunk.rows]
            out[chunk.rows] = self.prompts.attend(chunk, *rows, kv, self.to_latent, self.to_value).flatten(1)
        return out

    def _absorbed(self, nope: Tensor, rope: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any) -> Tensor:
        """Queries nope [T, num_heads, nope_size], rope [T, num_heads, rope_size] -> [T, num_heads * value_size]."""
        query = torch.cat((self.to_latent(nope), rope), 2)
        attended = attend_latent(self.prompts.backend, query, kv, batch, plan, self.prompts.scale, self.sizes.rank)
        return self.to_value(attended).flatten(1)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, rope_size]; computed in float32. Pairs that were neighbours lie half a size apart afterwards, in
        queries and keys alike, so their products are the same."""
        if not self.sizes.rotated:
            return x
        if self.sizes.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return rotate(x.float(), cos, sin).to(x.dtype)


def halves_of(kv_b: Tensor, sizes: Latent, num_heads: int) -> tuple[Tensor, Tensor]:
    """W_UK [num_heads, nope_size, rank] and W_UV transposed [num_heads, rank, value_size] of kv_b, each contiguous."""
    heads = kv_b.view(num_heads, sizes.nope_size + sizes.value_size, sizes.rank)
    return heads[:, : sizes.nope_size].contiguous(), heads[:, sizes.nope_size :].transpose(1, 2).contiguous()
