"""Push: the prefill node writes a prompt's KV into the slots that the decode node has reserved."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.kv_ready import KvTarget
from net.spans import Span
from net.transfer import URGENT, Completion, Op, TransferEngine


class Push:
    """A Mover (engine/kv/kv_transfer.py). The decode node takes no part before the handover."""

    def __init__(self, transfer: TransferEngine, region: str, target: KvTarget, timeout_s: float) -> None:
        """region: of this node's KV blocks."""
        self._transfer = transfer
        self._region = region
        self._target = target
        self._timeout_s = timeout_s

    async def move(self, spans: Sequence[Span]) -> Completion:
        target = self._target
        return await self._transfer.submit(
            *(target.node, Op.WRITE, self._region, target.region, spans, self._timeout_s, URGENT), epoch=target.epoch
        )
