"""Pooled blocks of a node whose own blocks differ: converted when they leave the arena, and when they return.

A block of the arena may have the tokens of several blocks of the pool: it comes back when all of them are found.

Staging areas, windows and layers are those of encoded blocks; only the conversion is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.block import BlockGeometry
from cache.store.store import Store
from engine.pooled.encoded_blocks import EncodedBlocks
from engine.unlike.pooled import PooledForm
from net.transfer.common.memory import Region


class UnlikeBlocks(EncodedBlocks):
    """`arena`: the engine's, on the CPU, with blocks of `own`; the pool has blocks of `pooled`. Registers its staging
    areas, `staging_bytes` each, with `store`."""

    def __init__(
        self, store: Store, arena: Region, own: BlockGeometry, pooled: BlockGeometry, staging_bytes: int
    ) -> None:
        self._form = PooledForm(torch.frombuffer(arena.memory, dtype=torch.uint8), own, pooled)
        self._each = self._form.each
        self._open(store, pooled.num_layers, self._form.layer_bytes, staging_bytes)

    def _encode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        slots = [self._of_block(self._codes_out, offset) for offset in offsets]
        for i, block_id in enumerate(block_ids):
            self._form.encode(block_id, slots[i * self._each : (i + 1) * self._each])

    def _decode(self, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        slots = [self._of_block(self._codes_in, offset) for offset in offsets]
        for i, block_id in enumerate(block_ids):
            self._form.decode(slots[i * self._each : (i + 1) * self._each], block_id)

    def _decode_layer(self, layer: int, block_ids: Sequence[int], offsets: Sequence[int]) -> None:
        rows = [offset // self._layer_bytes for offset in offsets]
        slots = [self._codes_in[row : row + 1] for row in rows]
        for i, block_id in enumerate(block_ids):
            self._form.decode(slots[i * self._each : (i + 1) * self._each], block_id, layer)

    def _let_go(self) -> None:
        self._form.close()
