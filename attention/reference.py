"""The definition of attention: every other backend is tested against this one.

For row i of request s at position p = ctx_lens[s] - q_len[s] + i, head h, its KV head g = h // (heads per KV head):

    out[i, h] = sum_{p - window < j <= p} softmax_j(cap(scale q[i, h] . k[j, g])) v[j, g]
    cap(x) = soft_cap tanh(x / soft_cap)      without a window: all j <= p; without a soft cap: cap(x) = x
    with sinks, softmax_j's sum has one more term, e^sink[h]

One request at a time, no blocking, no merging. Any float dtype: with float64 inputs it is the yardstick; with the dtype
of a backend under test it shows how far plain torch is from the yardstick. Quantized pools are decoded
(attention/codes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.codes import planes, rows_of
from attention.interface import RaggedBatch
from attention.rotary import RotateThenWrite


class ReferenceBackend(RotateThenWrite):
    """Slow and obvious."""

    name = "reference"
    reads_codes = True
    takes_sinks = True

    def plan(self, batch: RaggedBatch) -> None:
        return None

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: None) -> None:
        for kind, written in enumerate((k, v)):
            for plane, rows in planes(kv, written):
                for row, slot in enumerate(batch.slot_mapping.tolist()):
                    if slot >= 0:
                        block, offset = divmod(slot, batch.block_size)
                        plane[block, kind, :, offset] = rows[row]

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: RaggedBatch,
        plan: None,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        row = 0
        for s, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            unseen = max(0, kv_len - q_len + 1 - window) if window else 0  # by all rows
            k, v = tokens_of(kv, batch.block_tables[s], kv_len, q.dtype)[:, unseen:]
            out[row : row + q_len] = attend_one(q[row : row + q_len], k, v, scale, window, soft_cap, sinks)
            row += q_len
        return out


def tokens_of(kv: Tensor, block_table: Tensor, kv_len: int, dtype: torch.dtype) -> Tensor:
    """K and V of one request's tokens in order: [2, kv_len, num_kv_heads, head_size] of `dtype`."""
    position = torch.arange(kv_len, device=kv.device)
    block, offset = block_table[position // kv.shape[3]].long(), position % kv.shape[3]
    return rows_of(kv, lambda pool: torch.stack((pool[block, 0, :, offset], pool[block, 1, :, offset])), dtype)


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [q_len, num_heads, head_size], k and v [kv_len, num_kv_heads, head_size] of one request."""
    q_len, kv_len, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    row, key = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None], torch.arange(kv_len, device=q.device)
    hidden = key > row
    if window:
        hidden |= key <= row - window
    # The softmax of half-precision scores is taken in float32, as transformers does.
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(-1, q_len, 1)), -1)
    weights = scores.softmax(-1, dtype=wide)[..., :kv_len].to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)
