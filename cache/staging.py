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
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

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
        if self._waiters or count > len(self._free):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((count, waiter))
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():  # granted and then cancelled: pass the grant on
                    self._wake()
                else:
                    self._waiters = deque(pair for pair in self._waiters if pair[1] is not waiter)
                raise
        taken = [self._free.pop() for _ in range(count)]
        try:
            yield [slot * self.slot_bytes for slot in taken]
        finally:
            self._free += taken
            self._wake()

    def _wake(self) -> None:
        while self._waiters and self._waiters[0][1].done():
            self._waiters.popleft()
        if self._waiters and self._waiters[0][0] <= len(self._free):
            self._waiters.popleft()[1].set_result(None)

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
