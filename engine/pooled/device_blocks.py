"""Moves pooled blocks between the store and an arena in GPU memory. The store moves and checks bytes that the CPU can
read, so the blocks pass through windows of page-locked host memory, a few blocks at a time.

    get    store -> window -> device       the next blocks arrive while these are copied
    put    device -> window -> store       checksums are made in the window
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache.block import BlockGeometry, BlockKey
from cache.pool.policy import Facts
from cache.results import GetResult
from cache.store.store import Store
from engine.pooled.prefetch import total
from net.loop.tasks import awaited
from net.transfer.common.memory import Region
from net.transfer.device.peers import ended
from net.transfer.device.staging import Copying, DeviceRegion

WINDOW = "kv-window"
WINDOWS = 4
WINDOW_BLOCKS = 16


class DeviceBlocks:
    """A PoolBlocks (engine/pooled/pool_blocks.py) for `arena`. Registers WINDOWS * WINDOW_BLOCKS blocks of host memory
    with `store`."""

    def __init__(self, store: Store, arena: DeviceRegion, geometry: BlockGeometry) -> None:
        self._store = store
        self._device = arena.device
        self._block_bytes = geometry.block_bytes
        self._host = Region.shared(WINDOW, WINDOWS * WINDOW_BLOCKS * self._block_bytes)
        store.attach(self._host)
        self._device.pin(self._host)
        self._free: asyncio.Queue[int] = asyncio.Queue()  # offsets of windows
        for number in range(WINDOWS):
            self._free.put_nowait(number * WINDOW_BLOCKS * self._block_bytes)

    async def put(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], facts: Sequence[Facts], ttl_s: float = 0.0
    ) -> int:
        stored = 0
        for first in range(0, len(keys), WINDOW_BLOCKS):
            part = slice(first, first + WINDOW_BLOCKS)
            window = await self._free.get()
            try:
                await _ended(self._device.copy_out(self._host, self._moves(window, block_ids[part])))
                slots = self._slots(window, len(keys[part]))
                stored += await self._store.put_from(keys[part], WINDOW, slots, facts[part], ttl_s=ttl_s)
            finally:
                self._free.put_nowait(window)
        return stored

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._store.exists_many(keys)

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        """Returns or raises behind the last copy into the device."""
        parts: list[GetResult] = []
        copies: list[asyncio.Task[None]] = []
        try:
            for first in range(0, len(keys), WINDOW_BLOCKS):
                part = slice(first, first + WINDOW_BLOCKS)
                window = await self._free.get()
                try:
                    wanted = len(keys[part])
                    result = await self._store.get_into(keys[part], WINDOW, self._slots(window, wanted), site)
                    moves = self._moves(window, block_ids[part][: result.blocks])
                    copying = self._device.copy_in(self._host, moves) if moves else None
                except BaseException:
                    self._free.put_nowait(window)
                    raise
                copies.append(awaited(self._behind(copying, window)))
                parts.append(result)
                if result.blocks < wanted:
                    break
        finally:
            await ended(set(copies), cancel=False)
        for copy in copies:
            copy.result()
        return total(parts)

    def close(self) -> None:
        self._device.unpin(self._host)
        self._host.close()

    def _slots(self, window: int, count: int) -> list[int]:
        return [window + i * self._block_bytes for i in range(count)]

    def _moves(self, window: int, block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        slots, nbytes = self._slots(window, len(block_ids)), self._block_bytes
        return [(block_id * nbytes, slot, nbytes) for block_id, slot in zip(block_ids, slots, strict=True)]

    async def _behind(self, copying: Copying | None, window: int) -> None:
        """Give the window back once nothing reads it any more."""
        try:
            if copying is not None:
                await _ended(copying)
        finally:
            self._free.put_nowait(window)


async def _ended(copying: Copying) -> None:
    """Returns when the copies have ended, however often it is cancelled. Raises the error of the device."""
    waiting = awaited(asyncio.to_thread(copying.wait))
    await ended({waiting}, cancel=False)
    waiting.result()
