"""WriteBehind: writes blocks of the DRAM tier to SSD, in the order in which they were committed.

A block is held in DRAM until it has been written, so acknowledged blocks survive eviction. Blocks that arrive during a
write form the next batch. A block that the disk did not accept is owed: it may be evicted, and until then it is tried
again, first one block as a probe and, when that succeeds, the others.
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

RETRY_INTERVAL_S = 1.0  # between two probes with an owed block
OWED_MAX = 1 << 16  # maximum number of owed keys


class WriteBehind:
    """`write(rows)` writes at most `most` blocks to SSD and returns for each whether it is there; then `release(slot)`
    is called for each. `hold(key)` holds a block that is still in DRAM again and returns its slot; None if it is
    gone."""

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
        """Whether the block is being written or queued."""
        return key in self._queue or key in self._underway

    @property
    def owed(self) -> int:
        """Number of blocks that the disk did not accept and that may still be in DRAM."""
        return len(self._owed)

    def pending(self) -> list[BlockKey]:
        """All keys that are not on SSD yet."""
        return [*self._underway, *self._queue, *self._owed]

    def add(self, key: BlockKey, slot: int) -> None:
        """Queue a block, whose slot is held."""
        self._owed.pop(key, None)
        self._queue[key] = slot
        if self._task is None:
            self._task = keep(self._run, "write-behind")

    def want(self, keys: Iterable[BlockKey]) -> None:
        """Queue these blocks if they are in DRAM, including blocks that the disk did not accept before."""
        for key in keys:
            self._owed.pop(key, None)
            if key not in self and (slot := self._hold(key)) is not None:
                self.add(key, slot)

    def drop(self, key: BlockKey) -> None:
        """Remove the block from the queue. A running write continues."""
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
            if self._owed and all(done):  # the disk accepts blocks again
                self.want(list(self._owed))
        self._task = None
        if self._owed and self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._probe)

    def _owe(self, key: BlockKey) -> None:
        self._owed[key] = None
        if len(self._owed) > OWED_MAX:
            del self._owed[next(iter(self._owed))]

    def _probe(self) -> None:
        """Try to write one of the owed blocks."""
        self._timer = None
        while self._owed and not self._closed and self._task is None:
            self.want([next(iter(self._owed))])

    async def batch(self, timeout_s: float) -> bool:
        """Wait until a batch has been written or time is up. Returns False immediately if no write is running."""
        if self._task is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        return True

    async def through(self, keys: Iterable[BlockKey], timeout_s: float) -> bool:
        """Wait until none of these blocks is being written or queued. Returns False if time is up."""
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
        """The running write."""
        return self._task

    def close(self) -> None:
        """Stop trying owed blocks again."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
