"""Moves one prompt's KV from the prefill node to the decode node while the prefill node computes the rest.

kv_ready.py decides which bytes may leave. A Mover moves them: push.py writes them into the decode node's slots; pull.py
asks the decode node to read them; with --wire-dtype, wire.py encodes them first, and for a node with other blocks
converting.py converts them. One batch of bounded size is in flight
at a time. Pieces that become ready meanwhile form the next batch, so a slow network gets fewer, larger batches.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cache.pool.block_pool import BlockPool
from engine.core.kv_ready import KvReady, Piece
from engine.observe.intervals import Intervals
from net.loop.tasks import awaited
from net.transfer.common.spans import Span
from net.transfer.engine import Completion

BATCH_BYTES = 32 << 20


class Mover(Protocol):
    """Moves bytes of this node's KV arena into the decode node's arena."""

    async def move(self, spans: Sequence[Span]) -> Completion:
        """Move spans of (local offset, remote offset, length); returns when all have landed. When it raises, no read or
        write of them is in flight, unless the decode node is lost or will never continue the request."""


class Encoder(Protocol):
    """Encodes pieces of this node's KV arena and has a mover move the encoded bytes."""

    async def move(self, pieces: Sequence[Piece], mover: Mover) -> Completion:
        """Returns when the decode node has the KV of all pieces. Raises the mover's errors."""

    def notes(self, report: KvReport) -> dict[str, Any]:
        """For the timeline of the request, after its last piece."""


@dataclass(slots=True)
class KvReport:
    """The bytes moved so far."""

    nbytes: int = 0
    saved: int = 0  # bytes saved by the encoding
    batches: int = 0
    seconds: float = 0.0  # sum of the batches' durations
    transport: str = ""
    intervals: Intervals = field(default_factory=Intervals)  # of the batches, monotonic seconds and bytes


class TransferCut(Exception):
    """Not all KV has landed, because the request has ended meanwhile."""


class KvTransfer:
    """The transfer of one request. All methods run on the event loop. It holds blocks in `pool` until their bytes have
    moved."""

    def __init__(
        self, node: str, mover: Mover, ready: KvReady, pool: BlockPool, encoder: Encoder | None = None
    ) -> None:
        """node: the decode node; encoder: None = bytes move without encoding."""
        self.node = node
        self.report = KvReport()
        self._mover = mover
        self.encoder = encoder
        self._ready = ready
        self._pool = pool
        self._waiting: deque[Piece] = deque()
        self._moving: list[Piece] = []
        self._wake = asyncio.Event()
        self._closed = self._finishing = self._cut = False
        self._taken = self._landed = 0  # pieces so far
        self._marks: deque[tuple[int, int]] = deque()  # (pieces up to the end of a chunk, tokens up to its end)
        self._on_landed: Callable[[int], None] | None = None
        self._sender = awaited(self._send())

    def watch(self, landed: Callable[[int], None]) -> None:
        """Call `landed(tokens)` when this node's layers of the first `tokens` tokens are on the decode node."""
        self._on_landed = landed

    def leave_out(self, blocks: Iterable[int], end: int) -> None:
        """See KvReady.leave_out."""
        self._ready.leave_out(blocks, end)

    def layer_done(
        self, block_ids: Sequence[int], layer: int, start: int, end: int, others: Sequence[Sequence[int]] = ()
    ) -> None:
        """Layer `layer` of tokens [start, end) is in this request's `block_ids`, or in those of `others`."""
        if self._closed:
            return
        pieces = self._ready.layer_done(block_ids, layer, start, end, others)
        self._pool.hold([piece.block_id for piece in pieces])
        self._waiting.extend(pieces)
        self._taken += len(pieces)
        if self._ready.completes(layer, end):
            self._marks.append((self._taken, end))
            self._tell()
        self._wake.set()

    async def _send(self) -> None:
        while True:
            while not self._waiting or (self._ready.at_end and not self._closed):
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
            batch = self._moving = self._next_batch()
            begin = time.monotonic()
            try:
                done = await self._move(batch)
            finally:
                self._moving = []
                self._pool.unhold([piece.block_id for piece in batch])
            self.report.intervals.add(begin, time.monotonic(), done.nbytes)
            self.report.nbytes += done.nbytes
            self.report.saved += sum(piece.nbytes for piece in batch) - done.nbytes
            self.report.seconds += done.seconds
            self.report.batches += 1
            self.report.transport = done.transport or self.report.transport
            self._landed += len(batch)
            self._tell()

    def _tell(self) -> None:
        while self._marks and self._marks[0][0] <= self._landed:
            _, tokens = self._marks.popleft()
            if self._on_landed is not None:
                self._on_landed(tokens)

    async def _move(self, batch: Sequence[Piece]) -> Completion:
        if self.encoder is not None:
            return await self.encoder.move(batch, self._mover)
        return await self._mover.move([(piece.local, piece.remote, piece.nbytes) for piece in batch])

    def _next_batch(self) -> list[Piece]:
        batch = [self._waiting.popleft()]
        room = BATCH_BYTES - batch[0].nbytes
        while self._waiting and self._waiting[0].nbytes <= room:
            room -= self._waiting[0].nbytes
            batch.append(self._waiting.popleft())
        return batch

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""
        return (piece.block_id for pieces in (self._waiting, self._moving) for piece in pieces)

    async def finish(self) -> KvReport:
        """Call this after the last `layer_done`. Waits until all layers have landed. Raises the mover's errors, and
        TransferCut if `stop` was called before everything was under way."""
        self._closed = self._finishing = True
        self._wake.set()
        await self._sender
        if self._cut:
            raise TransferCut("the transfer was stopped before all KV had left")
        return self.report

    async def stop(self) -> None:
        """Give up. Once this returns, nothing more is moved, so the decode node may reuse its slots."""
        self._closed = True
        self._cut = self._cut or bool(self._waiting) or not self._finishing
        self._drop_waiting()
        self._wake.set()
        await asyncio.gather(self._sender, return_exceptions=True)

    def _drop_waiting(self) -> None:
        self._pool.unhold([piece.block_id for piece in self._waiting])
        self._waiting.clear()
