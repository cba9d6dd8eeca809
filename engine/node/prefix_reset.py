"""POST /reset_prefix_cache: all nodes of the cluster forget the KV that no request uses, so the next one is cold.

First all engines forget the names of their blocks and drop what they were about to publish, then all shares of the
pooled store remove their blocks. Kept blocks and those that programs stored remain; a running request keeps its own. KV
that requests compute or publish meanwhile may remain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

from engine.node.parts import Blocks, Serving
from net.bodies import answered, encode, typed
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError

RESET = "reset_prefix_cache"
RESET_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget the arena of the engine, or the share of the pooled store."""

    share: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    blocks: int


@dataclass(slots=True)
class NodeReset:
    """One node's answer."""

    arena_blocks: int = 0
    pooled_blocks: int = 0
    error: str | None = None


class PrefixReset:
    """Resets this node's caches for others, and those of all nodes for clients. `members()`: ids of all nodes."""

    def __init__(self, channel: Channel, serving: Serving, blocks: Blocks, members: Callable[[], list[str]]) -> None:
        self._channel = channel
        self._serving = serving
        self._share = blocks.share
        self._members = members
        channel.handle(RESET, typed(Reset, self._on_reset))

    async def cluster(self) -> dict[str, dict[str, object]]:
        """The answer of every node by its id: arena_blocks and pooled_blocks that were forgotten, and the error of a
        node that did not answer or failed, else None."""
        found = {node_id: NodeReset() for node_id in self._members()}
        await asyncio.gather(*(self._ask(node_id, report, share=False) for node_id, report in found.items()))
        await asyncio.gather(*(self._ask(node_id, report, share=True) for node_id, report in found.items()))
        return {node_id: asdict(report) for node_id, report in found.items()}

    async def _ask(self, node_id: str, report: NodeReset, *, share: bool) -> None:
        try:
            body, _ = await self._channel.call(node_id, RESET, encode(Reset(share)), timeout_s=RESET_TIMEOUT_S)
            count = answered(Forgotten, body).blocks
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            report.error = report.error or str(error) or type(error).__name__
            return
        if share:
            report.pooled_blocks = count
        else:
            report.arena_blocks = count

    async def _on_reset(self, peer_id: str, asked: Reset, data: memoryview) -> Forgotten:
        if asked.share:
            return Forgotten(0 if self._share is None else await self._share.clear())
        engine = self._serving.engine
        return Forgotten(0 if engine is None else await engine.forget_prefixes())
