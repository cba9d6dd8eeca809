"""Attention of a row whose keys lie partly in the window, piece by piece.

First the row attends to its blocks in the arena, among them those of its own tokens, while the first pieces of the
layer arrive; then to the pieces (engine/step/cold.py), which hold whole blocks before all of its tokens, so that each
row sees all their keys. attention/parts.py merges the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.interface import AttentionBackend, RaggedBatch
from attention.parts import Part, PartBackend, Parts, attend_part
from attention.torch_backend import gather
from engine.step.cold import Pieces


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
        parts = Parts()
        if len(q) == 1:
            parts.add(self._whole(q, kv, self._blocks, self._tokens, scale, soft_cap))
        else:
            self._own(parts, q, kv, scale, soft_cap)
        for places in self._pieces.layer():
            blocks = torch.from_numpy(places)
            parts.add(self._whole(q, self._layers, blocks, len(places) * self._size, scale, soft_cap))
        return parts.merged().to(q.dtype)

    def _own(self, parts: Parts, q: Tensor, kv: Tensor, scale: float, soft_cap: float) -> None:
        """A chunk, and the tokens before it in the arena."""
        k, v = self._gathered(kv, self._blocks, self._tokens, q.dtype)
        past = self._tokens - len(q)
        if past:
            parts.add(attend_part(q, k[:, :past], v[:, :past], scale, soft_cap))
        parts.add(attend_part(q, k[:, past:], v[:, past:], scale, soft_cap, own=True))

    def _whole(self, q: Tensor, kv: Tensor, blocks: Tensor, tokens: int, scale: float, soft_cap: float) -> Part:
        if len(q) == 1 and self._backend is not None:
            return self._backend.attend_part(q, kv, blocks, tokens, scale, soft_cap)
        return attend_part(q, *self._gathered(kv, blocks, tokens, q.dtype), scale, soft_cap)

    def _gathered(self, kv: Tensor, blocks: Tensor, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [num_kv_heads, tokens, head_size]."""
        found = gather(kv, blocks.long(), dtype)[:, :, :tokens]
        return found[0], found[-1]
