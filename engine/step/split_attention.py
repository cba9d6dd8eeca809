"""Attention of a row whose keys lie partly in a tier, or on other nodes.

The row attends to its blocks in the arena, among them those of its own tokens; to the cold blocks in DRAM, where they
lie; and to those that come through the window, piece by piece (engine/step/cold.py). The last two are whole blocks
before all of its tokens, so that each row sees all their keys. Other nodes attend to the blocks that they hold at the
same time. attention/parts.py merges the results.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        self._layers, self._pieces = kv_pool.flatten(0, 1), pieces
        self._tokens = batch.kv_lens[0]
        self._blocks = batch.block_tables[0, : -(-self._tokens // batch.block_size)]

    def __call__(self, q: Tensor, kv: Tensor, scale: float, soft_cap: float) -> Tensor:
        parts, asked, (near, far) = Parts(), self._pieces.ask(q, scale, soft_cap), self._pieces.layer()
        if len(q) == 1:
            parts.add(self._whole(q, kv, self._blocks, self._tokens, scale, soft_cap))
        else:
            self._own(parts, q, kv, scale, soft_cap)
        for part in over_blocks(self._backend, q, self._pieces.near, near, scale, soft_cap):
            parts.add(part)
        for places in far:
            for part in over_blocks(self._backend, q, self._layers, places, scale, soft_cap):
                parts.add(part)
        for part in asked():
            parts.add(part)
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


def over_blocks(
    backend: PartBackend | None, q: Tensor, layers: Tensor, places: Places, scale: float, soft_cap: float
) -> Iterator[Part]:
    """q [T, num_heads, head_size] over the whole blocks at these places of `layers` [layers of blocks, planes,
    num_kv_heads, block_size, head_size]. Every row sees all of their keys. backend: None = torch."""
    size = layers.shape[-2]
    most = max(1, NEAR_TOKENS // size) if len(q) > 1 or backend is None else max(1, len(places))
    for at in range(0, len(places), most):
        blocks = torch.from_numpy(places[at : at + most])
        if len(q) == 1 and backend is not None:
            yield backend.attend_part(q, layers, blocks, len(blocks) * size, scale, soft_cap)
        else:
            found = gather(layers, blocks.long(), q.dtype)
            yield attend_part(q, found[0], found[-1], scale, soft_cap)
