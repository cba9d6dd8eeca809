"""Staging: memory for values between the pool and callers without an arena, and for KV blocks that are encoded for the
transfer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from net.transfer.common.memory import Region

STAGING_BYTES = 64 << 20
REGION = "value-staging"


class Staging:
    """Slots of `slot_bytes` in a region that is created at first use; it takes memory only for used pages."""

    def __init__(self, slot_bytes: int, nbytes: int = STAGING_BYTES, name: str = REGION) -> None:
        """As many slots as fit into `nbytes`, at least 4; name: of the region."""
        self.slot_bytes = slot_bytes
        self.num_slots = max(4, nbytes // slot_bytes)
        self._name = name
        self._region: Region | None = None
        self._free = list(range(self.num_slots))
        self._waiters: deque[tuple[int, asyncio.Future[list[int]]]] = deque()  # each gets its slots as the result

    def region(self) -> Region:
        """Raises OSError when memory is refused."""
        if self._region is None:
            self._region = Region.shared(self._name, self.num_slots * self.slot_bytes)
        return self._region

    @asynccontextmanager
    async def slots(self, count: int) -> AsyncIterator[list[int]]:
        """Offsets of `count` slots, at most num_slots. Callers get them in the order of their requests."""
        if count > self.num_slots:
            raise ValueError(f"{count} slots requested of {self.num_slots}")
        taken = await self._take(count)
        try:
            yield [slot * self.slot_bytes for slot in taken]
        finally:
            self._give(taken)

    async def _take(self, count: int) -> list[int]:
        """A caller that gives slots back gives the next waiter its own at once: those that come before the waiter runs
        find none of them."""
        waiter: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, waiter))
        self._grant()
        try:
            return await waiter
        except BaseException:
            self._give(waiter.result() if waiter.done() and not waiter.cancelled() else [])
            raise

    def _give(self, slots: list[int]) -> None:
        self._free += slots
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            count, waiter = self._waiters[0]
            if not waiter.done():  # a cancelled one waits no longer
                if count > len(self._free):
                    return
                waiter.set_result([self._free.pop() for _ in range(count)])
            self._waiters.popleft()

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
