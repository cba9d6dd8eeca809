"""Promotions: read blocks from SSD into DRAM slots, in separate threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache.arena import Arena
from cache.block import BlockKey
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.ssd import SsdTier
from cache.ssd_reads import SsdReads
from cache.tiers.slots import DramSlots
from net.loop.tasks import awaited

READERS = 2  # threads: more do not read faster from one disk


@dataclass(slots=True)
class Promotion:
    """A block being read into `slot`; the task returns whether it arrived intact and is still needed."""

    slot: int
    task: asyncio.Task[bool]


class Promotions:
    """All running promotions. Without an SSD tier there are none."""

    def __init__(
        self, arena: Arena | None, ssd: SsdTier | None, pool: BlockPool, slots: DramSlots, reads: SsdReads
    ) -> None:
        self._arena = arena
        self._ssd = ssd
        self._pool = pool
        self._slots = slots
        self._reads = reads
        self._underway: dict[BlockKey, Promotion] = {}
        self._tasks: dict[int, asyncio.Task[bool]] = {}  # by slot, including blocks removed meanwhile
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ssd-read")

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._underway

    def of(self, key: BlockKey) -> Promotion | None:
        """The running promotion of the block, or a new one; None if it is not on SSD or there is no slot."""
        if key in self._underway:
            return self._underway[key]
        if self._ssd is None or self._arena is None or not self._ssd.contains(key) or not self._ssd.readable:
            return None
        try:
            slot = self._pool.allocate_for(self._ssd.facts(key))
        except OutOfBlocks:
            return None
        self._tasks[slot] = task = awaited(self._load(self._ssd, key, slot, self._arena.memory(slot)))
        self._underway[key] = promotion = Promotion(slot, task)
        return promotion

    async def _load(self, ssd: SsdTier, key: BlockKey, slot: int, memory: memoryview) -> bool:
        loop, good = asyncio.get_running_loop(), False
        queued, begin = self._reads.asked(), loop.time()
        try:
            found = await loop.run_in_executor(self._readers, ssd.get, key, memory)
            good = found is not None
            underway = self._underway.get(key)
            if found is None or underway is None or underway.slot != slot:
                return False
            self._slots.fill(slot, found.checksum, found.length, found.facts)
            return self._pool.name(slot, key, found.facts)
        finally:
            self._reads.over(queued, loop.time() - begin, good=good)
            self._tasks.pop(slot)
            if key in self._underway and self._underway[key].slot == slot:
                del self._underway[key]
            self._pool.release([slot])

    def drop(self, key: BlockKey) -> None:
        """The block was removed: callers that wait for it get None."""
        self._underway.pop(key, None)

    def tasks(self) -> list[asyncio.Task[bool]]:
        return list(self._tasks.values())

    def close(self) -> None:
        """Stop the threads. No read may be running."""
        self._readers.shutdown(wait=True)
