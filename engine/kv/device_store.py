"""Pooled blocks of an arena in GPU memory: the store moves and checks bytes the CPU can read, so they pass through a
page-locked window of host memory, a few blocks at a time.

    get    store -> window -> device       the next blocks arrive while these are copied
    put    device -> window -> store       checksums are made in the window
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from cache.block import BlockKey
from cache.policy import Facts
from cache.store import GetResult, Store
from net.memory import Region
from net.staging import Copying, DeviceRegion

WINDOW = "kv-window"
WINDOWS = 4
WINDOW_BLOCKS = 16


class DeviceStore:
    """`store` for the blocks of one device region, whose name every `region` must be."""

    def __init__(self, store: Store, device: DeviceRegion, block_bytes: int) -> None:
        """Takes WINDOWS * WINDOW_BLOCKS * block_bytes of page-locked memory."""
        self._store = store
        self._device = device
        self._block_bytes = block_bytes
        self._host = Region.shared(WINDOW, WINDOWS * WINDOW_BLOCKS * block_bytes)
        store.attach(self._host)
        device.device.pin(self._host)
        self._free: asyncio.Queue[int] = asyncio.Queue()  # offsets of windows
        for number in range(WINDOWS):
            self._free.put_nowait(number * WINDOW_BLOCKS * block_bytes)
        self._copies: set[asyncio.Task[None]] = set()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        return await self._store.lookup(keys)

    async def get_into(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> GetResult:
        """See Store.get_into. Returns or raises behind the last copy into the device."""
        self._check(region)
        parts: list[GetResult] = []
        copies: list[asyncio.Task[None]] = []
        try:
            for first in range(0, len(keys), WINDOW_BLOCKS):
                part = slice(first, first + WINDOW_BLOCKS)
                window = await self._free.get()
                try:
                    result = await self._store.get_into(keys[part], WINDOW, self._slots(window, len(keys[part])))
                    moves = self._moves(window, offsets[part][: result.blocks])
                    copying = self._device.device.copy_in(self._host, moves) if moves else None
                except BaseException:
                    self._free.put_nowait(window)
                    raise
                copies.append(self._behind(copying, window))
                parts.append(result)
                if result.blocks < len(keys[part]):
                    break
        finally:
            await asyncio.gather(*copies)
        return together(parts)

    async def put_from(
        self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int], facts: Sequence[Facts]
    ) -> int:
        """See Store.put_from."""
        self._check(region)
        stored = 0
        for first in range(0, len(keys), WINDOW_BLOCKS):
            part = slice(first, first + WINDOW_BLOCKS)
            window = await self._free.get()
            try:
                copying = self._device.device.copy_out(self._host, self._moves(window, offsets[part]))
                await _ended(copying)
                slots = self._slots(window, len(keys[part]))
                stored += await self._store.put_from(keys[part], WINDOW, slots, facts[part])
            finally:
                self._free.put_nowait(window)
        return stored

    async def close(self) -> None:
        """When nothing is got or put any more."""
        await asyncio.gather(*self._copies)
        self._device.device.unpin(self._host)

    def _check(self, region: str) -> None:
        if region != self._device.name:
            raise ValueError(f"region {region!r} is not {self._device.name!r}, the one on the device")

    def _slots(self, window: int, count: int) -> list[int]:
        return [window + i * self._block_bytes for i in range(count)]

    def _moves(self, window: int, offsets: Sequence[int]) -> list[tuple[int, int, int]]:
        slots = self._slots(window, len(offsets))
        return [(here, there, self._block_bytes) for here, there in zip(offsets, slots, strict=True)]

    def _behind(self, copying: Copying | None, window: int) -> asyncio.Task[None]:
        """Give the window back once nothing reads it any more."""

        async def wait() -> None:
            try:
                if copying is not None:
                    await _ended(copying)
            finally:
                self._free.put_nowait(window)

        task = asyncio.create_task(wait())
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        return task


async def _ended(copying: Copying) -> None:
    """Behind the copies also when cancelled; raises what the device raised."""
    waiting = asyncio.ensure_future(asyncio.to_thread(copying.wait))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        raise


def together(parts: Sequence[GetResult]) -> GetResult:
    """Of consecutive runs of blocks."""
    sums = [Counter[str](), Counter[str](), Counter[str]()]
    for part in parts:
        for total, more in zip(sums, (part.sources, part.transports, part.tiers), strict=True):
            total.update(more)
    sources, transports, tiers = (dict(total) for total in sums)
    return GetResult(sum(p.blocks for p in parts), sum(p.nbytes for p in parts), sources, transports, tiers)
