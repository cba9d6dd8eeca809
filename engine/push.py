"""Layer-wise push: a prompt's KV streams to the decode node's reserved slots while later layers still compute.

Mooncake (FAST'25, section 4.2) stores each layer's KV as soon as its attention is done, so that the transfer hides
behind the rest of the prefill. Here every finished layer of a chunk becomes spans of one transfer batch; while a batch
is in flight the next layers gather, so a slow network gets fewer, larger batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.block import BlockGeometry
from cache.pool import BlockPool
from net.transfer import Op, TransferEngine


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a prompt's KV goes: blocks reserved on the decode node."""

    node: str
    region: str
    block_ids: Sequence[int]  # one per block of the prompt
    first_missing: int  # leading blocks the decode node has already


@dataclass(slots=True)
class PushReport:
    nbytes: int = 0
    batches: int = 0
    seconds: float = 0.0  # sum of the batches' durations
    transport: str = ""


@dataclass(slots=True)
class _Pending:
    """Spans (local offset, remote offset, length) waiting for the wire, and the blocks they read."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class KvPush:
    """One request's push. All methods run on the event loop; blocks in flight are held in `pool`."""

    def __init__(
        self,
        transfer: TransferEngine,
        pool: BlockPool,
        geometry: BlockGeometry,
        region: str,
        target: PushTarget,
        timeout_s: float,
    ) -> None:
        self.target = target
        self.report = PushReport()
        self._transfer = transfer
        self._pool = pool
        self._geometry = geometry
        self._region = region
        self._timeout_s = timeout_s
        self._complete: set[int] = set()  # indices of blocks pushed with all their layers
        self._pending = _Pending()
        self._wake = asyncio.Event()
        self._closed = False
        self._sender = asyncio.create_task(self._send())

    def layer_done(self, block_ids: Sequence[int], layer: int, start: int, end: int) -> None:
        """Layer `layer` of tokens [start, end) is in the blocks `block_ids` of this request."""
        size = self._geometry.block_size
        if layer == 0:
            self._push_whole(block_ids, range(self.target.first_missing, start // size))
        touched = range(max(start // size, self.target.first_missing), -(-end // size))
        offset, length = layer * self._geometry.layer_bytes, self._geometry.layer_bytes
        self._add(block_ids, touched, offset, length)
        if layer == self._geometry.num_layers - 1:
            self._complete.update(i for i in touched if (i + 1) * size <= end)

    def _push_whole(self, block_ids: Sequence[int], indices: Iterable[int]) -> None:
        """Blocks that were found, not computed here, go as one span each."""
        missing = [i for i in indices if i not in self._complete]
        self._add(block_ids, missing, 0, self._geometry.block_bytes)
        self._complete.update(missing)

    def _add(self, block_ids: Sequence[int], indices: Iterable[int], offset: int, length: int) -> None:
        if self._closed:
            return
        size, remote = self._geometry.block_bytes, self.target.block_ids
        for i in indices:
            self._pending.spans.append((block_ids[i] * size + offset, remote[i] * size + offset, length))
            self._pending.blocks.append(block_ids[i])
            self._pool.hold([block_ids[i]])
        self._wake.set()

    async def _send(self) -> None:
        while True:
            while not self._pending.spans:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
            batch, self._pending = self._pending, _Pending()
            try:
                done = await self._transfer.submit(
                    self.target.node, Op.WRITE, self._region, self.target.region, batch.spans, self._timeout_s
                )
            finally:
                self._pool.unhold(batch.blocks)
            self.report.nbytes += done.nbytes
            self.report.seconds += done.seconds
            self.report.batches += 1
            self.report.transport = done.transport

    async def finish(self) -> PushReport:
        """All layers were handed in: wait until they have landed. Raises what the transfer raised."""
        self._closed = True
        self._wake.set()
        await self._sender
        return self.report

    async def stop(self) -> None:
        """Give up: nothing more is sent once this returns (the fence that lets the target reuse its slots)."""
        self._closed = True
        self._pool.unhold(self._pending.blocks)
        self._pending = _Pending()
        self._wake.set()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._pool.unhold(self._pending.blocks)
        self._pending = _Pending()
