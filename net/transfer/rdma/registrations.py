"""Memory that a card may use. Registering pins every page and deregistering unpins it, which takes seconds for a large
arena, so both run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from net.loop.tasks import awaited, spawn
from net.transfer.common.memory import Region
from net.transfer.common.transport import Unusable

INLINE_MAX = 1 << 20  # bytes of a region that is pinned on the loop: faster than waking a thread


@dataclass(frozen=True, slots=True)
class Registered:
    """A region as one device knows it."""

    address: int
    nbytes: int
    lkey: int
    rkey: int


class Registrations:
    """The registrations of one device, by the regions' names."""

    def __init__(self, pin: Callable[[Region], tuple[Any, Registered]], unpin: Callable[[Any], None]) -> None:
        """pin(region): (handle for unpin, keys); blocking, from any thread; raises Unusable."""
        self._pin = pin
        self._unpin = unpin
        self._known: dict[str, tuple[Region, Any, Registered]] = {}
        self._pinning: dict[Region, asyncio.Task[Registered]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # those of withdrawn regions too

    def known(self, region: Region) -> Registered | None:
        """The region's keys; None if it is not registered (yet)."""
        known = self._known.get(region.name)
        return known[2] if known is not None and known[0] is region else None

    def at_once(self, region: Region) -> Registered:
        """Pins the region on the loop, so use it only for small regions. Raises Unusable."""
        if (known := self.known(region)) is not None:
            return known
        self.withdraw(region.name)
        handle, registered = self._pin(region)
        self._known[region.name] = region, handle, registered
        return registered

    async def soon(self, region: Region) -> Registered:
        """Pins a large region in a thread. Raises Unusable, also if the region was withdrawn meanwhile."""
        if self.known(region) is not None or region.nbytes <= INLINE_MAX:
            return self.at_once(region)
        if (task := self._pinning.get(region)) is None:
            self.withdraw(region.name)  # another region had this name
            task = self._pinning[region] = awaited(self._in_thread(region))
            self._tasks.add(task)
            task.add_done_callback(self._over)
        return await asyncio.shield(task)

    async def _in_thread(self, region: Region) -> Registered:
        task = asyncio.current_task()
        try:
            handle, registered = await asyncio.to_thread(self._pin, region)
            if self._pinning.get(region) is not task:
                await asyncio.to_thread(self._unpin, handle)
                raise Unusable(f"region {region.name!r} was unregistered during its registration")
        finally:
            if self._pinning.get(region) is task:
                del self._pinning[region]
        self._known[region.name] = region, handle, registered
        return registered

    def _over(self, task: asyncio.Task[Registered]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the waiting tasks may have been cancelled

    def withdraw(self, name: str) -> None:
        """Make the card refuse requests with the region's key: immediately, or, for a large region, after a thread has
        unpinned its pages, which no other code may use until then. Idempotent."""
        for region in [one for one in self._pinning if one.name == name]:
            del self._pinning[region]
        if (known := self._known.pop(name, None)) is None:
            return
        region, handle, _ = known
        if region.nbytes <= INLINE_MAX:
            self._unpin(handle)
        else:
            task = spawn(asyncio.to_thread(self._unpin, handle), "unpinning a region")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Withdraw everything; return when no thread pins or unpins any more."""
        self._pinning.clear()
        while self._known or self._tasks:
            for name in list(self._known):
                self.withdraw(name)
            if self._tasks:
                await asyncio.wait(self._tasks)

    def withdraw_all(self) -> None:
        """Unpin everything, blocking. No thread may be pinning."""
        for _, handle, _ in self._known.values():
            self._unpin(handle)
        self._known.clear()
