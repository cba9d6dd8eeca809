"""Attention over latent rows: one row per token for all heads, whose first part is also the value.

A layer's kv is [num_blocks, 1, 1, block_size, row]: one plane and one head. With the value of `rank` elements,

    out[i, h] = sum_{j <= p} softmax_j(scale q[i, h] . row_j) row_j[: rank]

for row i at position p as attention/interface.py has it. The projections of heads to and from the latent belong to the
model (engine/model/latent.py).

A backend may have kernels of its own: methods `write_latent` and `attend_latent` with the arguments of these functions
after the first. Any other backend computes it as attention of ordinary heads: `as_heads` shows it the same memory as K
and as V, and the output beyond `rank` is dropped. The row is then read once for all heads too, because they share the
one KV head; the product with the values is row / rank times as long (9/8 for DeepSeek-V3).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attention.interface import AttentionBackend, RaggedBatch


def as_heads(kv: Tensor) -> Tensor:
    """[num_blocks, 2, 1, block_size, row]: the same memory, twice (stride 0)."""
    return kv.expand(-1, 2, -1, -1, -1)


def write_latent(backend: AttentionBackend, rows: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any) -> None:
    """Scatter rows [T, row] into one layer's kv (a strided view, any float dtype or codes) at slot_mapping."""
    own = getattr(backend, "write_latent", None)
    if own is not None:
        own(rows, kv, batch, plan)
    else:
        backend.write_kv(rows[:, None], rows[:, None], as_heads(kv), batch, plan)


def attend_latent(
    backend: AttentionBackend, q: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any, scale: float, rank: int
) -> Tensor:
    """q [T, num_heads, row] -> [T, num_heads, rank] of its dtype, maybe strided."""
    own = getattr(backend, "attend_latent", None)
    if own is not None:
        out: Tensor = own(q, kv, batch, plan, scale, rank)
        return out
    return backend.attend(q, as_heads(kv), batch, plan, scale)[..., :rank]
