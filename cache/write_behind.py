"""WriteBehind: blocks of the DRAM tier on their way to SSD, in the order they were committed.

A block is held until it has been written, so it cannot leave DRAM before: what was acknowledged survives eviction.
What came while a batch was written makes up the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from cache.block import BlockKey
from net.tasks import keep

Row = tuple[BlockKey, int]
"""(key, slot)"""


class WriteBehind:
    """`write(rows)` brings at most `most` blocks to SSD; `written(slot)` is called for each afterwards, whether that
    went well or not."""

    def __init__(
        self, most: int, write: Callable[[list[Row]], Awaitable[object]], written: Callable[[int], None]
    ) -> None:
        self._most = most
        self._write = write
        self._written = written
        self._queue: list[Row] = []
        self._task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()  # set, and a new one made, after each batch

    def add(self, key: BlockKey, slot: int) -> None:
        """To be written soon."""
        self._queue.append((key, slot))
        if self._task is None:
            self._task = keep(self._run, "write-behind")

    def drop(self, key: BlockKey) -> None:
        """It is not to be written any more, unless that has begun."""
        dropped = [slot for queued, slot in self._queue if queued == key]
        self._queue = [row for row in self._queue if row[0] != key]
        for slot in dropped:
            self._written(slot)

    async def _run(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[: self._most], self._queue[self._most :]
            try:
                await self._write(batch)
            finally:
                for _, slot in batch:  # one by one: the oldest is evicted first
                    self._written(slot)
                self._progress.set()
                self._progress = asyncio.Event()
        self._task = None

    async def batch(self, timeout_s: float) -> bool:
        """Until a batch is written, or time is up; False at once when nothing is under way."""
        if self._task is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        return True

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What is under way."""
        return self._task
