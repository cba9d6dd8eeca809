"""The attention backend protocol and the ragged batch it works on.

A step's queries of all requests are concatenated: request s owns rows cu_q[s] .. cu_q[s+1]. Row i of request s stands
at position ctx_lens[s] - q_len[s] + i and sees keys 0 .. that position. Decode is q_len = 1, a prefill chunk is
q_len > 1, a prefix hit is ctx_len > q_len: one contract for all of them.

KV lives in a paged pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]; block_tables name the
blocks of each request in order. A pool of int8 or float8_e4m3fn is quantized: attention/codes.py has its layout and
what reads and writes it in torch. It is given to backends that have `reads_codes = True` only.
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
    block_size: int  # tokens per block: what slot_mapping and block_tables count in
    # The same as host numbers, so that no backend has to synchronise with the device.
    q_lens: list[int]  # [S]
    kv_lens: list[int]  # [S]

    @property
    def num_requests(self) -> int:
        return len(self.q_lens)


class AttentionBackend(Protocol):
    """How one layer's attention is computed. `plan` runs once per step, the rest once per layer."""

    name: str

    def plan(self, batch: RaggedBatch) -> Any:
        """Whatever the backend wants to prepare once per step; handed back to `attend`."""

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any) -> None:
        """Scatter rotated k and v [T, num_kv_heads, head_size] into one layer's
        kv [num_blocks, 2, num_kv_heads, block_size, head_size] (a strided view, any float dtype or
        codes) at slot_mapping."""

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Any
    ) -> Tensor:
        """Rotary embedding (attention/rotary.py) of q and k, then write_kv: one kernel where a backend has one.

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

        window: keys that a row sees, itself included; 0 = all. soft_cap: scores become
        soft_cap * tanh(score / soft_cap) before the causal rule; 0.0 = as they are.
        Reads no slot that holds no token of the request: whatever lies there, NaN too, stays without effect."""


def reads_codes(backend: AttentionBackend) -> bool:
    """Whether it says `reads_codes = True`, and says it itself where it writes or attends in a way of its own: what a
    class inherits was said of the kernels it has replaced."""
    if not getattr(backend, "reads_codes", False):
        return False
    classes = type(backend).__mro__

    def depth(name: str) -> int:
        return next((i for i, one in enumerate(classes) if name in vars(one)), len(classes))

    kernels = ("attend", "write_kv", "rotate_and_write_kv")
    return "reads_codes" in getattr(backend, "__dict__", {}) or depth("reads_codes") <= min(map(depth, kernels))
