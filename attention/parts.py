"""Attention over a context in parts that need not be in memory together, merged by their log-sum-exp.

A part is softmax(scale q k^T) v over some of the keys, with the logarithm of the sum of its weights for each row:

    top = max_i lse_i      w_i = e^(lse_i - top)      out = sum_i w_i out_i / sum_i w_i      lse = top + ln sum_i w_i

The merge is associative, so parts may be merged as they come. Outputs and lse are float32: in bfloat16 each merge would
round again. It is the same merge as in the split kernels (attention/triton/merge.py, attention/cpu/decode/decode.cpp),
but between calls instead of within one.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attention.torch_backend import causal

MERGE_BYTES = 4 << 20
"""Outputs that wait to be merged: a chunk of many rows merges every part, a decode row all of them at once."""

Part = tuple[Tensor, Tensor]
"""(out [T, num_heads, head_size] float32, lse [T, num_heads] float32)"""


@runtime_checkable
class PartBackend(Protocol):
    """A backend that attends to a part of the keys of one row."""

    def attend_part(self, q: Tensor, kv: Tensor, blocks: Tensor, tokens: int, scale: float, soft_cap: float) -> Part:
        """q [1, num_heads, head_size] over the first `tokens` tokens of `blocks` [n] int32 of one layer's kv, all of
        which it sees."""


def attend_part(q: Tensor, k: Tensor, v: Tensor, scale: float, soft_cap: float = 0.0, *, own: bool = False) -> Part:
    """q [T, num_heads, head_size] over k and v [num_kv_heads, N, head_size]. Every row sees all keys; with `own`, which
    needs T = N, row i sees the keys 0 .. i."""
    rows, heads, size = q.shape
    if q.device.type == "cpu" and not soft_cap:
        # The query heads that share a KV head are the rows of one product if there is one row of each.
        by_head = q.view(k.shape[0], -1, size) if rows == 1 else q.transpose(0, 1)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(by_head[None], k[None], v[None], 0.0, own and rows > 1, scale=scale)
        if rows == 1:
            return out.reshape(1, heads, size).float(), lse.reshape(1, heads).float()
        return out[0].transpose(0, 1).float(), lse[0].transpose(0, 1).float()
    by_kv_head = q.transpose(0, 1).unflatten(0, (k.shape[0], -1))  # [num_kv_heads, group, T, head_size]
    scores = (by_kv_head.float() @ k.float()[:, None].mT) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    if own:
        scores.masked_fill_(~causal(q.transpose(0, 1)[None], k[None]), -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.float()[:, None]
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).transpose(0, 1)


def merge(outs: Tensor, lses: Tensor) -> Part:
    """outs [P, T, num_heads, head_size] and lses [P, T, num_heads] of P parts -> one part over all their keys."""
    top = lses.amax(0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    return (weights[..., None] * outs).sum(0) / total[..., None], top + total.log()


class Parts:
    """Parts of the same rows, merged as memory demands."""

    def __init__(self) -> None:
        self._waiting: list[Part] = []
        self._nbytes = 0

    def add(self, part: Part) -> None:
        self._waiting.append(part)
        self._nbytes += part[0].nbytes
        if self._nbytes > MERGE_BYTES and len(self._waiting) > 1:
            self._merge()

    def _merge(self) -> None:
        outs, lses = zip(*self._waiting, strict=True)
        self._waiting = [merge(torch.stack(outs), torch.stack(lses))]
        self._nbytes = self._waiting[0][0].nbytes

    def part(self) -> Part:
        """One part over all keys. There was at least one."""
        if len(self._waiting) > 1:
            self._merge()
        return self._waiting[0]

    def merged(self) -> Tensor:
        """[T, num_heads, head_size] float32 over all keys."""
        return self.part()[0]
