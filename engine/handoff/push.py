"""Push: the prefill node writes a prompt's KV into the slots that the decode node has reserved."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_ready import KvTarget
from engine.handoff import messages
from engine.handoff.messages import Decode
from net.bodies import encode
from net.channel.channel import Channel
from net.transfer.common.spans import Span, pack_spans
from net.transfer.engine import URGENT, Completion, Op, TransferEngine


class Push:
    """A Mover (engine/core/kv_transfer.py). The decode node takes no part before the handover."""

    def __init__(self, transfer: TransferEngine, region: str, target: KvTarget, timeout_s: float) -> None:
        """region: this node's KV blocks."""
        self._transfer = transfer
        self._region = region
        self._target = target
        self._timeout_s = timeout_s

    async def move(self, spans: Sequence[Span]) -> Completion:
        target = self._target
        return await self._transfer.submit(
            *(target.node, Op.WRITE, self._region, target.region, spans, self._timeout_s, URGENT), epoch=target.epoch
        )


class EncodedPush:
    """A Mover of encoded bytes (engine/handoff/wire.py): after the bytes have landed, it asks the decode node to decode
    them."""

    def __init__(self, push: Push, channel: Channel, request_id: str, target: KvTarget, timeout_s: float) -> None:
        """push: writes from the region of the encoded bytes."""
        self._push = push
        self._channel = channel
        self._request_id = request_id
        self._target = target
        self._timeout_s = timeout_s

    async def move(self, spans: Sequence[Span]) -> Completion:
        done = await self._push.move(spans)
        body, data = encode(Decode(self._request_id)), [pack_spans(spans)]
        await self._channel.call(self._target.node, messages.DECODE, body, data, self._timeout_s)
        return done
