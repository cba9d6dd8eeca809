"""KV of a prompt for a decode node whose blocks differ: converted here, layer by layer, while the next layers compute.

    prefill node    its blocks ── convert ──> staging area ── push or pull ──> the reserved blocks
    decode node                                                                has its own blocks, and does nothing

KV travels in the form of the decode node. If only the number of tokens in a block differs, nothing is converted: the
tokens of each head are copied from the arena to their place in the other blocks (engine/unlike/spans.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.codes import pool_in
from cache.block import SCALE_BYTES, BlockGeometry, type_bytes
from cache.staging import Staging
from engine.core.kv_ready import KV_REGION, KvTarget, Piece
from engine.core.kv_transfer import KvReport, Mover
from engine.pooled.conversion import Conversion
from engine.unlike.rows import copy_rows
from engine.unlike.spans import runs, stretches
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span
from net.transfer.engine import Completion

UNLIKE_REGION = "kv-unlike"

Cell = tuple[int, int, int]
"""(block here, its index in the request, layer)"""


class Converter:
    """Makes KV of this node's arena into that of others. The staging area and its thread are made at first use, because
    most clusters have nodes of one kind."""

    def __init__(
        self, arena: Region, geometry: BlockGeometry, staging_bytes: int, register: Callable[[Region], None]
    ) -> None:
        """arena: on the CPU. register: makes the staging area readable for transfers."""
        self._arena: Tensor | None = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._geometry = geometry
        self._staging_bytes, self._register = staging_bytes, register
        row_bytes = max(max(type_bytes.values()) * geometry.head_size, geometry.head_size + SCALE_BYTES)
        self._cell_bytes = geometry.planes * geometry.num_kv_heads * geometry.block_size * row_bytes
        self._staging: Staging | None = None
        self._conversion: Conversion | None = None
        self.nbytes, self.seconds = 0, 0.0  # of converted KV, in the form of its decode nodes

    @property
    def bytes_per_s(self) -> float:
        """Measured; 0 = nothing was converted yet."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def used(self) -> bool:
        """Whether the staging area exists."""
        return self._staging is not None

    def onto(self, target: KvTarget) -> Converted:
        """For one transfer to a node whose blocks differ."""
        there = self._geometry.like(target.dtype, target.block_size)
        return Converted(self, self._geometry, there, target)

    def staging(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._cell_bytes, self._staging_bytes, UNLIKE_REGION)
            self._conversion = Conversion(UNLIKE_REGION)
            self._register(self._staging.region())
        return self._staging

    async def convert(self, cells: Sequence[Cell], offsets: Sequence[int], sent: BlockGeometry) -> None:
        """Write each cell, whole, in the form `sent` to the staging area at offsets[i]."""
        assert self._conversion is not None, "made with the staging area"
        begin = time.perf_counter()
        await self._conversion.run(partial(self._convert, cells, offsets, sent))
        self.seconds += time.perf_counter() - begin
        self.nbytes += len(cells) * sent.layer_bytes

    def _convert(self, cells: Sequence[Cell], offsets: Sequence[int], sent: BlockGeometry) -> None:
        own = self._geometry
        assert self._arena is not None, "no transfer outlives the engine"
        blocks = pool_in(self._arena, own.shape, own.dtype)
        memory = torch.frombuffer(self.staging().region().memory, dtype=torch.uint8)
        for (block_id, _, layer), at in zip(cells, offsets, strict=True):
            rows = pool_in(memory[at : at + sent.layer_bytes], sent.shape[1:], sent.dtype)
            copy_rows(blocks[block_id, layer], 0, rows[0], 0, own.block_size)

    def close(self) -> None:
        """Release the memory. No call may be running."""
        self._arena = None  # it keeps the memory mapped
        if self._conversion is not None and self._staging is not None:
            self._conversion.close()
            self._staging.close()


class Converted:
    """The KV of one transfer, in the form of its decode node: an Encoder (engine/core/kv_transfer.py)."""

    def __init__(self, converter: Converter, own: BlockGeometry, there: BlockGeometry, target: KvTarget) -> None:
        self._converter, self._own, self._there, self._target = converter, own, there, target
        self._sent = own.like(there.dtype, own.block_size)  # the form in the staging area
        self._copies = own.dtype == there.dtype
        self._seconds = 0.0

    @property
    def region(self) -> str:
        """From which the bytes leave."""
        return KV_REGION if self._copies else UNLIKE_REGION

    def notes(self, report: KvReport) -> dict[str, Any]:
        return {"form": f"{self._there.dtype}/{self._there.block_size}", "conversion_seconds": self._seconds}

    def target(self, num_tokens: int) -> KvTarget:
        """For KvReady, which speaks of blocks of this node: block i of the prompt has number i there."""
        own, there = self._own.block_size, self._there.block_size
        missing = self._target.first_missing * there // own
        return replace(self._target, block_ids=range(-(-num_tokens // own)), first_missing=missing)

    async def move(self, pieces: Sequence[Piece], mover: Mover) -> Completion:
        """Raises the mover's errors."""
        if not self._copies:
            self._converter.staging()
        cells = self._cells(pieces)
        if self._copies:
            block_bytes, layer_bytes = self._own.block_bytes, self._own.layer_bytes
            spans = [
                span
                for (block_id, index, layer), tokens in cells.items()
                for span in self._spans(block_id * block_bytes + layer * layer_bytes, index, layer, tokens)
            ]
            return await mover.move(spans) if spans else Completion(0, 0.0, "")
        nbytes, seconds, transport, names = 0, 0.0, "", list(cells)
        staging = self._converter.staging()
        window = staging.num_slots // 2  # leaves room for two prompts
        for first in range(0, len(names), window):
            part = names[first : first + window]
            async with staging.slots(len(part)) as offsets:
                begin = time.perf_counter()
                await self._converter.convert(part, offsets, self._sent)
                self._seconds += time.perf_counter() - begin
                placed = zip(part, offsets, strict=True)
                spans = [span for cell, at in placed for span in self._spans(at, *cell[1:], cells[cell])]
                if spans:
                    done = await mover.move(spans)
                    nbytes, seconds, transport = nbytes + done.nbytes, seconds + done.seconds, done.transport
        return Completion(nbytes, seconds, transport)

    def _cells(self, pieces: Sequence[Piece]) -> Mapping[Cell, int]:
        """Tokens with KV of each cell. A block that was half full at first may be there twice: the fuller one is what
        the arena has."""
        cells: dict[Cell, int] = defaultdict(int)
        for piece in pieces:
            index, offset = divmod(piece.remote, self._own.block_bytes)
            first = offset // self._own.layer_bytes
            for layer in range(first, first + piece.nbytes // self._own.layer_bytes):
                cell = piece.block_id, index, layer
                cells[cell] = max(cells[cell], piece.tokens)
        return cells

    def _spans(self, at: int, index: int, layer: int, tokens: int) -> Iterator[Span]:
        """From the part of a layer at offset `at`, in the form `_sent`, to its places in the decode node's blocks."""
        there = self._there
        found = stretches(index, tokens, self._own.block_size, there.block_size, self._target.first_missing)
        for one in found:
            base = self._target.block_ids[one.block] * there.block_bytes + layer * there.layer_bytes
            for here, to, nbytes in runs(self._sent, one.first, there, one.start, one.count):
                yield at + here, base + to, nbytes
