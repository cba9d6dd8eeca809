"""Inspection: blocks that readers reported as damaged. They are misses for readers until they have been checked here.

Without this, a reader that asks again at once gets the same bytes. A whole block (the damage happened on its way) is
readable again after the check; a damaged one is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from cache.block import BlockKey
from net.loop.tasks import spawn


class Inspection:
    """`verify(key)` checks one block and drops it if it is damaged."""

    def __init__(self, verify: Callable[[BlockKey], Awaitable[bool]]) -> None:
        self._verify = verify
        self._waiting: set[BlockKey] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block is reported and not checked yet."""
        return key in self._waiting

    def begin(self, keys: Iterable[BlockKey]) -> None:
        """Hide these blocks from readers now, and check them in the background."""
        keys = [key for key in dict.fromkeys(keys) if key not in self._waiting]
        self._waiting.update(keys)
        task = spawn(self._inspect(keys), "inspecting damaged blocks")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _inspect(self, keys: list[BlockKey]) -> None:
        try:
            for key in keys:
                await self._verify(key)
                self._waiting.discard(key)
        finally:
            self._waiting.difference_update(keys)

    async def close(self) -> None:
        """Wait until all reported blocks are checked."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))
