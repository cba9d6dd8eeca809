"""Pull: the prefill node announces which KV is ready, and the decode node reads it from the prefill node's blocks.

    prefill node                                    decode node
    PullOffer.move ── engine.handoff.pull(spans) ──>  KvPull.read: one READ into the reserved slots
                   <── reply: bytes, time ──  the spans have landed; the prefill node releases its blocks

The prefill node holds the blocks until the reply. If no reply arrives because the decode node hangs or is gone, the
request fails there. A late READ of reused blocks is harmless: the decode node uses the bytes only after the handover,
which follows the last reply. Only the decode node's own READs write its slots, so it may reuse them as soon as they
end.

With --wire-dtype the READ fetches encoded bytes, and the reply follows their decoding (engine/handoff/wire.py). KvPull
also decodes bytes that a prefill node has pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from engine.core.kv_ready import KvTarget
from engine.handoff import messages
from engine.handoff.messages import Pull, Pulled
from net.bodies import answered, encode
from net.channel.channel import Channel
from net.errors import RemoteError
from net.loop.tasks import awaited
from net.transfer.common.spans import Span, pack_spans
from net.transfer.engine import URGENT, Completion, Op, TransferEngine

T = TypeVar("T")

REPLY_MARGIN_S = 5.0  # lets the reader's own deadline pass first


class Decoder(Protocol):
    """See engine.handoff.wire.WireCodec."""

    def fits(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes of the arena can be encoded layers of one block."""

    async def decode(self, spans: Sequence[Span]) -> None:
        """Decode in place. Returns only when all writes have ended, also if it is cancelled."""


class PullOffer:
    """The prefill node's side: a Mover (engine/core/kv_transfer.py)."""

    def __init__(
        self, channel: Channel, region: str, request_id: str, target: KvTarget, timeout_s: float, encoded: bool = True
    ) -> None:
        """region: this node's KV blocks, or the staging area of their encoded or converted bytes; encoded: as in
        Pull."""
        self._encoded = encoded
        self._channel = channel
        self._region = region
        self._request_id = request_id
        self._target = target
        self._timeout_s = timeout_s

    async def move(self, spans: Sequence[Span]) -> Completion:
        body = encode(Pull(self._request_id, self._region, self._timeout_s, self._encoded))
        reply, _ = await self._channel.call(
            self._target.node, messages.PULL, body, [pack_spans(spans)], self._timeout_s + REPLY_MARGIN_S
        )
        done = answered(Pulled, reply)
        return Completion(done.nbytes, done.seconds, done.transport)


class KvPull:
    """The decode node's side, one per reserved request: writes into its blocks, and can stop all such writes."""

    def __init__(
        self,
        transfer: TransferEngine,
        region: str,
        block_bytes: int,
        node: str,
        block_ids: Collection[int],
        decoder: Decoder | None = None,
    ) -> None:
        """node: the prefill node; block_ids: the blocks of `region` here that may be written; decoder: decodes the
        bytes that arrive, None = they are not encoded."""
        self._transfer = transfer
        self._region = region
        self._block_bytes = block_bytes
        self._node = node
        self._block_ids = frozenset(block_ids)
        self._decoder = decoder
        self._writes: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def read(self, region: str, spans: Sequence[Span], timeout_s: float, encoded: bool = True) -> Completion:
        """Read spans of (offset in `region` there, offset here, length); encoded: as in Pull. Raises RemoteError if the
        request has ended or a span is outside its blocks, and the errors of TransferEngine.submit."""
        decoder = self._decoder if encoded else None
        self._check(spans, decoder)
        return await self._until_stopped(self._fetch(region, spans, timeout_s, decoder))

    async def decode(self, spans: Sequence[Span]) -> None:
        """Decode the bytes that the prefill node has written to `spans`. Raises RemoteError as `read` does."""
        if self._decoder is None:
            raise RemoteError("this node expects KV without encoding (--wire-dtype)", code="bad_request")
        self._check(spans, self._decoder)
        await self._until_stopped(self._decoder.decode(spans))

    async def _fetch(self, region: str, spans: Sequence[Span], timeout_s: float, decoder: Decoder | None) -> Completion:
        swapped = [(here, there, nbytes) for there, here, nbytes in spans]
        done = await self._transfer.submit(self._node, Op.READ, self._region, region, swapped, timeout_s, URGENT)
        if decoder is not None:
            await decoder.decode(spans)
        return done

    def allow(self, block_ids: Collection[int]) -> None:
        """More blocks may be written."""
        self._block_ids |= frozenset(block_ids)

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        task = awaited(work)
        self._writes.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._stopped:
                raise RemoteError("the request has ended on the decode node", code="gone") from None
            raise
        finally:
            self._writes.discard(task)

    def _check(self, spans: Sequence[Span], decoder: Decoder | None) -> None:
        if self._stopped:
            raise RemoteError("the request has ended on the decode node", code="gone")
        for _, here, nbytes in spans:
            block, offset = divmod(here, self._block_bytes)
            if block not in self._block_ids or offset + nbytes > self._block_bytes:
                raise RemoteError(f"bytes {here}..{here + nbytes} lie outside the request's blocks", code="bad_request")
            if decoder is not None and not decoder.fits(here, nbytes):
                raise RemoteError(f"bytes {here}..{here + nbytes} are not whole encoded layers", code="bad_request")

    async def stop(self) -> None:
        """Stop all reads and decodes. Once this returns, nothing writes to the blocks."""
        self._stopped = True
        writes = list(self._writes)
        for task in writes:
            task.cancel()
        if writes:
            await asyncio.wait(writes)
