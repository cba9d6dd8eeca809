"""Blocks of the arena as blocks of the pool, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.codes import POOL_DTYPES, pool_in
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry
from engine.unlike.rows import copy_rows


class PooledForm:
    """Converts blocks of an arena on the CPU. A block of it has the tokens of `each` blocks of the pool."""

    def __init__(self, arena: Tensor, own: BlockGeometry, pooled: BlockGeometry) -> None:
        """arena: uint8 [bytes]."""
        self._blocks = pool_in(arena, own.shape, own.dtype)
        self._pooled = pooled
        self.each = own.block_size // pooled.block_size
        self.layer_bytes = pooled.pool_bytes // pooled.num_layers

    def encode(self, block_id: int, slots: Sequence[Tensor]) -> None:
        """Write block `block_id` of the arena to `each` slots [num_layers, layer_bytes] uint8, contiguous."""
        for place, slot in enumerate(slots):
            rows = self._wide(slot) if self._pooled.encoded else self._view(slot)
            copy_rows(self._blocks[block_id], self._pooled.block_size * place, rows, 0, self._pooled.block_size)
            if self._pooled.encoded:
                encode_block(rows, POOL_DTYPES[self._pooled.pool_dtype], slot.view(-1))

    def decode(self, slots: Sequence[Tensor], block_id: int, layer: int | None = None) -> None:
        """The reverse; with `layer`, only that layer, from slots [1, layer_bytes]."""
        block = self._blocks[block_id] if layer is None else self._blocks[block_id, layer : layer + 1]
        for place, slot in enumerate(slots):
            if self._pooled.encoded:
                rows = self._wide(slot)
                decode_block(slot.view(-1), POOL_DTYPES[self._pooled.pool_dtype], rows)
            else:
                rows = self._view(slot)
            copy_rows(rows, 0, block, self._pooled.block_size * place, self._pooled.block_size)

    def _wide(self, slot: Tensor) -> Tensor:
        """Room for the layers of a slot in float32."""
        return torch.empty(len(slot), *self._pooled.shape[1:])

    def _view(self, slot: Tensor) -> Tensor:
        """The layers of a slot [n, layer_bytes], in the pool's type: [n, *shape without layers]."""
        return pool_in(slot.view(-1), self._pooled.shape[1:], self._pooled.dtype)

    def close(self) -> None:
        """Let go of the arena's memory."""
        del self._blocks
