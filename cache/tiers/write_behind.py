"""WriteBehind: blocks of the DRAM tier on their way to SSD, in the order they were committed.

A block is held until it has been written, so it cannot leave DRAM before: what was acknowledged survives eviction.
What came while a batch was written makes up the next one. A block that the disk did not take is owed: it may be
evicted, and as long as it is not it is tried again, one block as a probe and the others once that has been taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from cache.block import BlockKey
from net.loop.tasks import keep

Row = tuple[BlockKey, int]
"""(key, slot)"""

AGAIN_S = 1.0  # between two tries of what is owed
OWED_MAX = 1 << 16  # keys


class WriteBehind:
    """`write(rows)` brings at most `most` blocks to SSD and says of each whether it is there; `release(slot)` is called
    for each afterwards. `hold(key)`: the slot of a block that is still in DRAM, held again; None when it is gone."""

    def __init__(
        self,
        most: int,
        write: Callable[[list[Row]], Awaitable[Sequence[bool]]],
        release: Callable[[int], None],
        hold: Callable[[BlockKey], int | None],
    ) -> None:
        self._most = most
        self._write = write
        self._release = release
        self._hold = hold
        self._queue: dict[BlockKey, int] = {}
        self._underway: dict[BlockKey, int] = {}
        self._owed: dict[BlockKey, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._progress = asyncio.Event()  # set, and a new one made, after each batch

    def __contains__(self, key: BlockKey) -> bool:
        """It is being written, or will be."""
        return key in self._queue or key in self._underway

    @property
    def owed(self) -> int:
        """Blocks that the disk did not take, and which may still be in DRAM."""
        return len(self._owed)

    def pending(self) -> list[BlockKey]:
        """All that is not on SSD yet."""
        return [*self._underway, *self._queue, *self._owed]

    def add(self, key: BlockKey, slot: int) -> None:
        """To be written soon. The slot is held."""
        self._owed.pop(key, None)
        self._queue[key] = slot
        if self._task is None:
            self._task = keep(self._run, "write-behind")

    def want(self, keys: Iterable[BlockKey]) -> None:
        """To be written soon, if they are in DRAM: again, where the disk did not take them before."""
        for key in keys:
            self._owed.pop(key, None)
            if key not in self and (slot := self._hold(key)) is not None:
                self.add(key, slot)

    def drop(self, key: BlockKey) -> None:
        """It need not be written any more. A write that is under way goes on."""
        self._owed.pop(key, None)
        if (slot := self._queue.pop(key, None)) is not None:
            self._release(slot)

    async def _run(self) -> None:
        while self._queue:
            batch = list(islice(self._queue.items(), self._most))
            for key, _ in batch:
                del self._queue[key]
            self._underway = dict(batch)
            done: Sequence[bool] = [False] * len(batch)
            try:
                done = await self._write(batch)
            finally:
                self._underway = {}
                for (key, slot), written in zip(batch, done, strict=True):  # one by one: the oldest is evicted first
                    if not written:
                        self._owe(key)
                    self._release(slot)
                self._progress.set()
                self._progress = asyncio.Event()
            if self._owed and all(done):  # the disk takes blocks again
                self.want(list(self._owed))
        self._task = None
        if self._owed and self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._probe)

    def _owe(self, key: BlockKey) -> None:
        self._owed[key] = None
        if len(self._owed) > OWED_MAX:
            del self._owed[next(iter(self._owed))]

    def _probe(self) -> None:
        """Offer the disk one block of those that it did not take."""
        self._timer = None
        while self._owed and not self._closed and self._task is None:
            self.want([next(iter(self._owed))])

    async def batch(self, timeout_s: float) -> bool:
        """Until a batch is written, or time is up; False at once when nothing is under way."""
        if self._task is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        return True

    async def through(self, keys: Iterable[BlockKey], timeout_s: float) -> bool:
        """Until no write of these is under way or waits. False: time is up."""
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        left = set(keys)
        while left := {key for key in left if key in self}:
            if now() >= deadline:
                return False
            await self.batch(deadline - now())
        return True

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What is under way."""
        return self._task

    def close(self) -> None:
        """Nothing is tried again."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
