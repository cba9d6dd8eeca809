"""Encodes KV in one byte per element for the transfer from a prefill node to a decode node (--wire-dtype).

    prefill node    its blocks ── encode ──> staging area ── push or pull ──> bytes of the reserved blocks
    decode node                                        the same bytes ── decode in place ──> KV of the arena's type

Encoded bytes are fewer than the values they stand for, so each piece lands in the bytes that its values will fill. The
decode node needs no staging area: it copies out at most one encoded block at a time and writes the values over it.
With push and with pull, the prefill node learns that the bytes have landed only after they are decoded.

A block that a chunk leaves half full is sent again once the next chunk has filled it. The space after its tokens is
encoded as zeros, because a scale covers a whole block and must not depend on the block's previous user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from attention.codes import DTYPES
from attention.quantize_torch import chunks, decode_layers, encode_layers
from cache.block import BlockGeometry
from cache.staging import Staging
from engine.core.kv_ready import Piece
from engine.core.kv_transfer import KvReport, Mover
from engine.pooled.conversion import Conversion
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span
from net.transfer.engine import Completion

WIRE_REGION = "kv-wire"

Placed = tuple[Piece, int]
"""A piece and the offset of its encoded bytes in the staging area."""


class WireCodec:
    """The encoder and decoder of one node. `arena`: the engine's KV arena, on the CPU."""

    def __init__(self, arena: Region, geometry: BlockGeometry, staging_bytes: int) -> None:
        self._geometry = geometry
        self._dtype = DTYPES[geometry.wire_dtype]
        self._bytes = torch.frombuffer(arena.memory, dtype=torch.uint8).view(-1, geometry.block_bytes)
        self._blocks = self._bytes.view(getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        self._staging = Staging(geometry.encoded_bytes, staging_bytes, WIRE_REGION)
        codes = torch.frombuffer(self._staging.region().memory, dtype=torch.uint8)
        self._codes = codes.view(-1, geometry.encoded_layer_bytes)
        self._window = self._staging.num_slots // 2  # leaves room for two prompts
        self._conversion = Conversion("kv-wire")

    @property
    def dtype(self) -> str:
        """The type of the codes: fp8 or int8."""
        return self._geometry.wire_dtype

    @property
    def region(self) -> Region:
        """The staging area, for registration: encoded bytes are read from there."""
        return self._staging.region()

    # --- prefill node

    async def move(self, pieces: Sequence[Piece], mover: Mover) -> Completion:
        """Encode `pieces` and move them with `mover`, one window at a time. Raises the mover's errors."""
        nbytes, seconds, transport = 0, 0.0, ""
        for window in windows(pieces, self._geometry, self._window):
            async with self._staging.slots(len(window)) as offsets:
                placed = list(self._placed(window, offsets))
                await self._conversion.run(partial(self._encode, placed))
                done = await mover.move([(at, piece.remote, self._encoded_bytes(piece)) for piece, at in placed])
            nbytes, seconds, transport = nbytes + done.nbytes, seconds + done.seconds, done.transport
        return Completion(nbytes, seconds, transport)

    def notes(self, report: KvReport) -> dict[str, Any]:
        return {"wire_dtype": self.dtype, "saved_bytes": report.saved}

    def _placed(self, window: Sequence[Sequence[Piece]], offsets: Sequence[int]) -> Iterator[Placed]:
        for pieces, offset in zip(window, offsets, strict=True):
            for piece in pieces:
                yield piece, offset
                offset += self._encoded_bytes(piece)

    def _encoded_bytes(self, piece: Piece) -> int:
        return piece.nbytes // self._geometry.layer_bytes * self._geometry.encoded_layer_bytes

    def _encode(self, placed: Sequence[Placed]) -> None:
        cells: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # tokens -> (block, layer, row of codes)
        for piece, offset in placed:
            row = offset // self._geometry.encoded_layer_bytes
            for i, layer in enumerate(_layers(piece.local, piece.nbytes, self._geometry)):
                cells[piece.tokens].append((piece.block_id, layer, row + i))
        for tokens, found in cells.items():
            blocks, layers, rows = torch.tensor(found).unbind(1)
            for part in chunks(len(found), self._geometry.shape[1:]):
                values = self._blocks[blocks[part], layers[part]].to(torch.float32)  # advanced indexing copies
                values[..., tokens:, :] = 0.0
                self._codes[rows[part]] = encode_layers(values, self._dtype)

    # --- decode node

    def fits(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes of the arena can hold encoded layers of one block."""
        g = self._geometry
        first, inside = divmod(offset % g.block_bytes, g.layer_bytes)
        count, rest = divmod(nbytes, g.encoded_layer_bytes)
        return inside == rest == 0 < count <= g.num_layers - first

    async def decode(self, spans: Sequence[Span]) -> None:
        """Decode spans of (unused, offset in the arena, encoded bytes) in place. `fits` must hold for each span, and no
        two may cover the same layer of a block. Returns only when all writes have ended, also if it is cancelled."""
        await self._conversion.run(partial(self._decode, spans))

    def _decode(self, spans: Sequence[Span]) -> None:
        g = self._geometry
        single: dict[int, list[int]] = defaultdict(list)  # layer -> blocks
        for _, offset, nbytes in spans:
            block, start = divmod(offset, g.block_bytes)
            first, count = start // g.layer_bytes, nbytes // g.encoded_layer_bytes
            if count == 1:
                single[first].append(block)
                continue
            encoded = self._bytes[block, start : start + nbytes].clone().view(count, -1)
            for part in chunks(count, g.shape[1:]):
                values = decode_layers(encoded[part], self._dtype, g.shape[1:])
                self._blocks[block, first + part.start : first + part.stop] = values
        for layer, blocks in single.items():
            ids, start = torch.tensor(blocks), layer * g.layer_bytes
            for part in chunks(len(blocks), g.shape[1:]):
                encoded = self._bytes[ids[part], start : start + g.encoded_layer_bytes]
                values = decode_layers(encoded, self._dtype, g.shape[1:])
                self._blocks[ids[part], layer] = values.to(self._blocks.dtype)

    def close(self) -> None:
        """Release the memory. No call may be running."""
        self._conversion.close()
        del self._bytes, self._blocks, self._codes  # they keep the memory mapped
        self._staging.close()


def windows(pieces: Sequence[Piece], geometry: BlockGeometry, num_slots: int) -> Iterator[list[list[Piece]]]:
    """Cut the pieces, in order, into windows of at most `num_slots` slots; a slot has the size of one encoded block and
    lists the pieces it holds. No window has two pieces for the same bytes, because the second must land after the
    first is decoded."""
    window: list[list[Piece]] = []
    room, taken = 0, set[tuple[int, int]]()
    for piece in pieces:
        layers = _layers(piece.remote, piece.nbytes, geometry)
        cells = {(piece.remote // geometry.block_bytes, layer) for layer in layers}
        if not taken.isdisjoint(cells) or (len(layers) > room and len(window) == num_slots):
            yield window
            window, room, taken = [], 0, set()
        if len(layers) > room:
            window.append([])
            room = geometry.num_layers
        window[-1].append(piece)
        room -= len(layers)
        taken |= cells
    if window:
        yield window


def _layers(offset: int, nbytes: int, geometry: BlockGeometry) -> range:
    """The layers of a block that these bytes of an arena hold."""
    first = offset % geometry.block_bytes // geometry.layer_bytes
    return range(first, first + nbytes // geometry.layer_bytes)
