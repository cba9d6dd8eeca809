"""Prefixes on their way here from lower tiers and other nodes: which requests load one, what steps wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cache.store.calls import HOME_ERRORS
from engine.core.batcher import Batcher
from engine.core.layered_load import Arriving, LayeredLoad, LayerGate
from engine.step.request import Request
from net.loop.tasks import spawn

log = logging.getLogger("mooncake.engine")

MAX_LOADS_IN_FLIGHT = 4


class Loader(Protocol):
    """What finds prefixes (engine/handoff/reuse.py)."""

    async def load(self, request: Request) -> LayeredLoad | None:
        """Extend the request's prefix. A load that is returned goes on beside the request's first step."""

    def held_blocks(self) -> Iterator[int]:
        """One for each transfer reference held for what it loads."""


class PrefixLoads:
    """The loads of the batcher's requests. `wake` is called when one may have become runnable."""

    def __init__(self, batcher: Batcher, loader: Loader, wake: Callable[[], None]) -> None:
        self._batcher = batcher
        self._loader = loader
        self._wake = wake
        self._arriving = Arriving()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, now: float) -> None:
        """Look for the prefixes of the next waiting requests."""
        for request in self._batcher.loads(now, MAX_LOADS_IN_FLIGHT):
            task = spawn(self._load(request), "prefix load")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _load(self, request: Request) -> None:
        try:
            load = await self._loader.load(request)
            if load is not None:
                self._arriving.add(request, load)
        except HOME_ERRORS as error:
            log.info("the prefix load of %s failed; the node will compute it: %r", request.request_id, error)
        except Exception:
            log.exception("the prefix load of %s failed; the node will compute it", request.request_id)
        self._batcher.loaded(time.monotonic(), request)
        self._wake()

    def gates(self, requests: Iterable[Request]) -> dict[str, LayerGate]:
        """Request id -> what a step over `requests` has to wait for. In the engine thread."""
        return self._arriving.gates(requests)

    async def settle(self, requests: Iterable[Request]) -> list[Request]:
        """Wait for the loads that a step over `requests` waited for: their blocks have names from now on. Returns those
        whose prefix did not arrive whole; they are aborted, for their acceptors to place again."""
        failed = []
        for request, whole in await self._arriving.settle(requests):
            if request.finished:
                continue
            if whole:
                self._batcher.blocks.name_full(request)
            else:
                self._batcher.abort(time.monotonic(), request.request_id)
                failed.append(request)
        return failed

    def held_blocks(self) -> Iterator[int]:
        """One for each transfer reference on a block that is being filled."""
        return self._loader.held_blocks()

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._arriving.drop(request_id)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._arriving.close()
