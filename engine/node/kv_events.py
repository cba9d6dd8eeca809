"""Tells others which blocks this node's arena holds: KV events in vLLM's form (net/kv_events/).

Blocks of the pooled store are not told: every node reaches them equally, so they say nothing about where to send a
request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from cache.block import BlockGeometry, BlockKey
from engine.config.flags import UsageError
from engine.node.engine import Engine
from engine.step.arena_events import ArenaEvents
from net.kv_events.publisher import EventPublisher
from net.kv_events.settings import EventSettings
from net.kv_events.wire import AllBlocksCleared, Event


class KvEvents:
    """The events of one engine."""

    def __init__(self, settings: EventSettings, engine: Engine, geometry: BlockGeometry, root: BlockKey) -> None:
        """Raises UsageError if an endpoint cannot be opened."""
        try:
            self._publisher = EventPublisher(settings)
        except OSError as error:
            raise UsageError(f"--kv-events-config: {error}") from None
        self._waiting: list[Event] = []
        self._events = ArenaEvents(geometry.block_size, root, self._add, geometry.kind)
        self._engine = engine

    def start(self) -> None:
        """Call it before the engine computes."""
        self._publisher.start()
        self._add([AllBlocksCleared()])  # subscribers may know blocks of an earlier process
        self._engine.batcher.blocks.watch(self._events.named)
        self._engine.pool.watch(self._events.changed)
        self._engine.on_forgotten(self._events.cleared)

    def renewed(self, root: BlockKey) -> None:
        """Requests without a cache salt have keys of this root from now on."""
        self._events.renewed(root)

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        one = self._publisher
        return {"endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "batches": one.published}

    async def close(self) -> None:
        self._flush()
        await self._publisher.close()

    def _add(self, events: Sequence[Event]) -> None:
        """The events of one turn of the event loop, for example of a step, go out in one batch."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += events

    def _flush(self) -> None:
        if self._waiting:
            self._publisher.publish(time.time(), self._waiting)
            self._waiting = []
