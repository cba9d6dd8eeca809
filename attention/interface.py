"""The attention backend protocol and the ragged batch it works on.

A step concatenates the queries of all requests: request s owns rows cu_q[s] .. cu_q[s+1]. Row i of request s has
position ctx_lens[s] - q_len[s] + i and sees the keys 0 .. that position. Decode is q_len = 1, a prefill chunk is
q_len > 1, and a prefix hit is ctx_len > q_len. One contract covers all of them.

KV is in a paged pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]. block_tables lists the blocks of
each request in order. A pool of int8 or float8_e4m3fn is quantized: attention/codes.py defines its layout, and reads
and writes it in torch. Only backends with `reads_codes = True` get such a pool (attention/declared.py).

A model with a latent keeps one row per token instead of K and V: attention/latent.py shows it to a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(slots=True)
class RaggedBatch:
    """One step's layout. Requests with q_len == 1 come first (num_decodes of them)."""

    cu_q: Tensor  # [S + 1] int32: row offsets; cu_q[S] = T
    ctx_lens: Tensor  # [S] int32: KV length including this step's tokens
    block_tables: Tensor  # [S, max_blocks] int32, padded with 0
    slot_mapping: Tensor  # [T] int64: block * block_size + offset; -1 = padding row, skip
    positions: Tensor  # [T] int64
    num_decodes: int
    block_size: int  # tokens per block: the unit of slot_mapping and block_tables
    # The lengths again as host numbers, so that no backend has to synchronise with the device.
    q_lens: list[int]  # [S]
    kv_lens: list[int]  # [S]
    recorded: bool = False  # a graph repeats the work for other lengths, so no shape may follow from lengths

    @property
    def num_requests(self) -> int:
        return len(self.q_lens)


class AttentionBackend(Protocol):
    """How one layer's attention is computed. `plan` runs once per step, the rest once per layer."""

    name: str

    def plan(self, batch: RaggedBatch) -> Any:
        """Prepare the step once. The result goes to every `attend` of the step."""

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any) -> None:
        """Scatter rotated k and v [T, num_kv_heads, head_size] into one layer's
        kv [num_blocks, 2, num_kv_heads, block_size, head_size] (a strided view, any float dtype or
        codes) at slot_mapping."""

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any
    ) -> Tensor:
        """Rotary embedding (attention/rotary.py) of q and k, then write_kv; a backend may use one kernel for both.

        qkv [T, num_heads + 2 num_kv_heads, head_size]: heads of q, then of k, then of v; its memory may be reused.
        cos, sin [T, head_size / 2] float32, of the rows' positions. Returns q, rotated [T, num_heads, head_size]."""

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: RaggedBatch,
        plan: Any,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """softmax(scale q k^T) v with the causal rule above. q [T, num_heads, head_size] -> same shape and dtype.

        window: number of keys that a row sees, including its own; 0 = all. soft_cap: scores become
        soft_cap * tanh(score / soft_cap) before the causal rule; 0.0 = unchanged.
        Slots without a token of the request have no effect, even if they contain NaN. With a window, these include the
        blocks of which no row of the request sees a token: they may be other requests' by now."""
