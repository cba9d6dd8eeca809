"""Kept: blocks of a LocalStore that programs pinned (`pin=True`) and that are never evicted, up to a limit.

With an SSD tier, a kept block may leave DRAM once it is on SSD with a mark, which survives a restart. Until then, and
always without an SSD tier, it is held in DRAM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cache.block import BlockKey
from cache.pool.block_pool import BlockPool
from cache.ssd import SsdTier
from net.loop.tasks import spawn


class Kept:
    """At most `limit` blocks. `tier_of(key)`: the tier of a block, or None. `mark(key, kept)` marks the block on SSD,
    in the tier's thread, and returns whether it is there with this mark."""

    def __init__(
        self,
        limit: int,
        pool: BlockPool,
        ssd: SsdTier | None,
        tier_of: Callable[[BlockKey], str | None],
        mark: Callable[[BlockKey, bool], Awaitable[bool]],
    ) -> None:
        self.limit = limit
        self._pool = pool
        self._ssd = ssd
        self._tier_of = tier_of
        self._mark = mark
        self._keys: set[BlockKey] = set() if ssd is None else set(ssd.kept_keys())
        self._held: dict[BlockKey, int] = {}  # key -> slot of blocks that are only in DRAM
        self._marking: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def keep(self, key: BlockKey) -> bool:
        """Keep a block that is here. Returns False if the limit is reached."""
        if key in self._keys:
            return True
        if len(self._keys) >= self.limit:  # some may have been lost with a damaged medium
            self._keys = {key for key in self._keys if self._tier_of(key) is not None}
        if len(self._keys) >= self.limit:
            return False
        self._keys.add(key)
        if (slot := self._pool.lookup(key)) is not None:
            self._pool.hold([slot])
            self._held[key] = slot
        self._mark_soon(key, kept=True)
        return True

    def give_up(self, key: BlockKey) -> bool:
        """Let the block be evicted again. Returns False if it was not kept."""
        if key not in self._keys:
            return False
        self.lost(key)
        self._mark_soon(key, kept=False)
        return True

    def lost(self, key: BlockKey) -> None:
        """The held block is gone or damaged."""
        self._keys.discard(key)
        self._let_go(key)

    def written(self, key: BlockKey) -> None:
        """The block is on SSD with its mark."""
        self._let_go(key)

    def _let_go(self, key: BlockKey) -> None:
        if (slot := self._held.pop(key, None)) is not None:
            self._pool.unhold([slot])

    def _mark_soon(self, key: BlockKey, *, kept: bool) -> None:
        if self._ssd is None:
            return
        task = spawn(self._marked(key, kept), "marking of a pinned block")
        self._marking.add(task)
        task.add_done_callback(self._marking.discard)

    async def _marked(self, key: BlockKey, kept: bool) -> None:
        if await self._mark(key, kept) and kept and key in self._keys:
            self.written(key)

    async def close(self) -> None:
        """Wait for running marks, then release the held blocks."""
        if self._marking:
            await asyncio.wait(list(self._marking))
        for key in list(self._held):
            self._let_go(key)
