"""A few threads that copy blocks in parallel, for a caller on the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from net.transfer.common.copying import all_ended

T = TypeVar("T")


class CopyThreads:
    """`count` threads, at most four."""

    def __init__(self) -> None:
        self.count = max(1, min(4, len(os.sched_getaffinity(0))))
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, works: Sequence[Callable[[Event], T]]) -> list[T]:
        """Runs `works` concurrently; returns their results. Each gets an event that tells it to stop: if this is
        cancelled, it waits until all have ended before it raises."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="copy-checked")
        stop, loop = Event(), asyncio.get_running_loop()
        return await all_ended([loop.run_in_executor(self._pool, work, stop) for work in works], stop.set)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
