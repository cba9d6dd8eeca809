"""Loads of prefixes from lower tiers and other nodes: which requests load one, and which loads a step waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cache.store.calls import HOME_ERRORS
from engine.core.batcher import Batcher
from engine.core.layered_load import Arriving, LayeredLoad
from engine.step.request import Request
from net.loop.tasks import spawn

log = logging.getLogger("mooncake.engine")

MAX_LOADS_IN_FLIGHT = 4


class Loader(Protocol):
    """Loads prefixes (engine/handoff/reuse.py)."""

    async def load(self, request: Request) -> LayeredLoad | None:
        """Extend the request's prefix. A returned load continues during the request's first step."""

    def held_blocks(self) -> Iterator[int]:
        """Ids of the blocks being filled, one item per transfer reference."""

    def fresh_blocks(self) -> Iterator[int]:
        """Ids of blocks that no request has taken over yet, one item per request reference."""


class PrefixLoads:
    """The loads of the batcher's requests by `loader`; `arriving`: those that a step may use before they end. It calls
    `loaded(request)` when the request may have become runnable."""

    def __init__(self, batcher: Batcher, loader: Loader, loaded: Callable[[Request], None]) -> None:
        self._batcher = batcher
        self.loader = loader
        self._loaded = loaded
        self.arriving = Arriving()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, now: float) -> None:
        """Look for the prefixes of the next waiting requests."""
        for request in self._batcher.loads(now, MAX_LOADS_IN_FLIGHT):
            task = spawn(self._load(request), "prefix load")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _load(self, request: Request) -> None:
        try:
            load = await self.loader.load(request)
            if load is not None:
                self.arriving.add(request, load)
        except HOME_ERRORS as error:
            log.info("the prefix load of %s failed; the node will compute it: %r", request.request_id, error)
        except Exception:
            log.exception("the prefix load of %s failed; the node will compute it", request.request_id)
        self._batcher.loaded(time.monotonic(), request)
        self._loaded(request)

    async def settle(self, requests: Iterable[Request]) -> list[Request]:
        """Wait for the end of the loads that a step over `requests` used, and name their blocks. Returns the requests
        whose prefix is incomplete; they are aborted, and their acceptors place them again."""
        failed = []
        for request, whole in await self.arriving.settle(requests):
            if request.finished:
                continue
            if whole:
                self._batcher.blocks.name_full(request)
            else:
                self._batcher.abort(time.monotonic(), request.request_id)
                failed.append(request)
        return failed

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.arriving.close()
