"""Attention of a row whose keys lie partly in a tier.

The row attends to its blocks in the arena, among them those of its own tokens; to the cold blocks in DRAM, where they
lie; and to those that come through the window, piece by piece (engine/step/cold.py). The last two are whole blocks
before all of its tokens, so that each row sees all their keys. attention/parts.py merges the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.interface import AttentionBackend, RaggedBatch
from attention.parts import Part, PartBackend, Parts, attend_part
from attention.torch_backend import gather
from engine.step.cold import Pieces, Places

NEAR_TOKENS = 8192
"""Keys that a chunk attends to at once: it needs K and V in one row of tokens, so they are copied."""


class SplitAttention:
    """An engine.model.decoder.Attend for one step of one request."""

    def __init__(self, backend: AttentionBackend, kv_pool: Tensor, batch: RaggedBatch, pieces: Pieces) -> None:
        """kv_pool [num_blocks, num_layers, planes, num_kv_heads, block_size, head_size]; batch: of the one row, in its
        blocks of the arena."""
        self._backend = backend if isinstance(backend, PartBackend) else None
        self._layers, self._pieces, self._size = kv_pool.flatten(0, 1), pieces, batch.block_size
        self._tokens = batch.kv_lens[0]
        self._blocks = batch.block_tables[0, : -(-self._tokens // batch.block_size)]

    def __call__(self, q: Tensor, kv: Tensor, scale: float, soft_cap: float) -> Tensor:
        parts, (near, far) = Parts(), self._pieces.layer()
        if len(q) == 1:
            parts.add(self._whole(q, kv, self._blocks, self._tokens, scale, soft_cap))
        else:
            self._own(parts, q, kv, scale, soft_cap)
        most = max(1, NEAR_TOKENS // self._size) if len(q) > 1 or self._backend is None else max(1, len(near))
        for at in range(0, len(near), most):
            parts.add(self._at(q, self._pieces.near, near[at : at + most], scale, soft_cap))
        for places in far:
            parts.add(self._at(q, self._layers, places, scale, soft_cap))
        return parts.merged().to(q.dtype)

    def _own(self, parts: Parts, q: Tensor, kv: Tensor, scale: float, soft_cap: float) -> None:
        """A chunk, and the tokens before it in the arena."""
        k, v = self._gathered(kv, self._blocks, self._tokens, q.dtype)
        past = self._tokens - len(q)
        if past:
            parts.add(attend_part(q, k[:, :past], v[:, :past], scale, soft_cap))
        parts.add(attend_part(q, k[:, past:], v[:, past:], scale, soft_cap, own=True))

    def _at(self, q: Tensor, layers: Tensor, places: Places, scale: float, soft_cap: float) -> Part:
        """Whole blocks at these places of an arena."""
        return self._whole(q, layers, torch.from_numpy(places), len(places) * self._size, scale, soft_cap)

    def _whole(self, q: Tensor, kv: Tensor, blocks: Tensor, tokens: int, scale: float, soft_cap: float) -> Part:
        if len(q) == 1 and self._backend is not None:
            return self._backend.attend_part(q, kv, blocks, tokens, scale, soft_cap)
        return attend_part(q, *self._gathered(kv, blocks, tokens, q.dtype), scale, soft_cap)

    def _gathered(self, kv: Tensor, blocks: Tensor, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [num_kv_heads, tokens, head_size]."""
        found = gather(kv, blocks.long(), dtype)[:, :, :tokens]
        return found[0], found[-1]
