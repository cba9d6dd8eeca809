"""Pull: the prefill node says what is ready, the decode node reads it out of the prefill node's blocks.

    prefill node                                    decode node
    PullOffer.move ── engine.kv.pull(spans) ──>  KvPull.read: one READ into the reserved slots
                   <── reply: bytes, time ──  the spans have landed; the prefill node lets its blocks go

Until the reply the prefill node holds the blocks. No reply, because the decode node hangs or is gone, means that the
request fails there: a late READ of blocks that are reused by then fetches bytes nobody will look at, for they count
only from the handover on, which comes after the last reply. The slots on the decode node are written by its own READs
alone, so it may reuse them as soon as those are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from engine.kv.kv_ready import KvTarget
from engine.serving import messages
from engine.serving.messages import Pull, Pulled
from net.bodies import answered, encode
from net.channel import Channel
from net.errors import RemoteError
from net.spans import Span, pack_spans
from net.tasks import awaited
from net.transfer import URGENT, Completion, Op, TransferEngine

REPLY_MARGIN_S = 5.0  # the reader's own deadline should be the one that is met


class PullOffer:
    """The prefill node's side: a Mover (engine/kv/kv_transfer.py)."""

    def __init__(self, channel: Channel, region: str, request_id: str, target: KvTarget, timeout_s: float) -> None:
        """region: of this node's KV blocks."""
        self._channel = channel
        self._region = region
        self._request_id = request_id
        self._target = target
        self._timeout_s = timeout_s

    async def move(self, spans: Sequence[Span]) -> Completion:
        body = encode(Pull(self._request_id, self._region, self._timeout_s))
        reply, _ = await self._channel.call(
            self._target.node, messages.PULL, body, [pack_spans(spans)], self._timeout_s + REPLY_MARGIN_S
        )
        done = answered(Pulled, reply)
        return Completion(done.nbytes, done.seconds, done.transport)


class KvPull:
    """The decode node's side, one per reserved request: READs into its blocks, and their end."""

    def __init__(
        self, transfer: TransferEngine, region: str, block_bytes: int, node: str, block_ids: Collection[int]
    ) -> None:
        """node: the prefill node; block_ids: those of `region` here that it may fill."""
        self._transfer = transfer
        self._region = region
        self._block_bytes = block_bytes
        self._node = node
        self._block_ids = frozenset(block_ids)
        self._reads: set[asyncio.Task[Completion]] = set()
        self._stopped = False

    async def read(self, region: str, spans: Sequence[Span], timeout_s: float) -> Completion:
        """Fetch (offset in `region` there, offset here, length). Raises RemoteError when the request has ended or a
        span lies outside its blocks, and what TransferEngine.submit raises."""
        if self._stopped:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._check(spans)
        swapped = [(here, there, nbytes) for there, here, nbytes in spans]
        reading = self._transfer.submit(self._node, Op.READ, self._region, region, swapped, timeout_s, URGENT)
        task = awaited(reading)
        self._reads.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._stopped:
                raise RemoteError("the request has ended on the decode node", code="gone") from None
            raise
        finally:
            self._reads.discard(task)

    def _check(self, spans: Sequence[Span]) -> None:
        for _, here, nbytes in spans:
            block, offset = divmod(here, self._block_bytes)
            if block not in self._block_ids or offset + nbytes > self._block_bytes:
                raise RemoteError(f"bytes {here}..{here + nbytes} are not the request's to fill", code="bad_request")

    async def stop(self) -> None:
        """No byte is written into the blocks once this returns."""
        self._stopped = True
        reads = list(self._reads)
        for task in reads:
            task.cancel()
        if reads:
            await asyncio.wait(reads)
