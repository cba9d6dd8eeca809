"""Copies memory on this host without blocking the event loop for long.

A switch to a thread and back costs more than 0.1 ms, so the loop copies batches up to TURNS_MAX itself: at most
INLINE_MAX per turn. Threads copy larger batches, but never urgent ones, which must not wait for a thread that copies
bulk. All copies use ctypes.memmove: unlike a slice assignment, it releases the interpreter lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from typing import TypeVar

from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span
from net.transfer.common.transport import Op

T = TypeVar("T")

INLINE_MAX = 512 << 10  # bytes copied on the event loop: about 0.1 ms
TURNS_MAX = 4 << 20  # bytes copied in turns of the loop
PIECE_BYTES = 2 << 20  # copied between two checks whether to stop
SPLIT_MIN = 8 << 20  # bytes of a batch from which a second thread pays off

Move = tuple[int, int, int]
"""(destination address, source address, length)"""


def copy_now(op: Op, local: Region, remote: Region, spans: Sequence[Span]) -> None:
    """Copy a small batch on the event loop, without interruption."""
    here, there = local.address, remote.address
    if op is Op.READ:
        for ours, theirs, length in spans:
            memmove(here + ours, there + theirs, length)
    else:
        for ours, theirs, length in spans:
            memmove(there + theirs, here + ours, length)


class Copy:
    """One batch between two regions. It keeps both mapped while it runs, even if a region is closed. The copying thread
    adds each copied piece to `landed`."""

    def __init__(
        self, op: Op, local: Region, remote: Region, spans: Sequence[Span], landed: LandedSpans | None = None
    ) -> None:
        self.stopped = False
        self._op, self._landed = op, landed
        self._views = (local.memory[:0], remote.memory[:0])  # exports of the mappings keep them alive
        here, there = self._here, self._there = local.address, remote.address
        if op is Op.READ:
            self._moves = [(here + ours, there + theirs, length) for ours, theirs, length in spans]
        else:
            self._moves = [(there + theirs, here + ours, length) for ours, theirs, length in spans]

    def stop(self) -> None:
        """Stop after the current piece."""
        self.stopped = True

    def run(self, moves: Sequence[Move] | None = None) -> None:
        """Copy everything, in any thread."""
        for target, source, length in self._moves if moves is None else moves:
            if length <= PIECE_BYTES:
                if self.stopped:
                    return
                memmove(target, source, length)
                if self._landed is not None:
                    self._tell(target, source, length)
                continue
            for start in range(0, length, PIECE_BYTES):
                if self.stopped:
                    return
                count = min(PIECE_BYTES, length - start)
                memmove(target + start, source + start, count)
                if self._landed is not None:
                    self._tell(target + start, source + start, count)

    def _tell(self, target: int, source: int, length: int) -> None:
        assert self._landed is not None
        here, there = (target, source) if self._op is Op.READ else (source, target)
        self._landed.add([(here - self._here, there - self._there, length)])

    def turns(self) -> Iterator[None]:
        """Copy at most INLINE_MAX between two yields."""
        room = INLINE_MAX
        for target, source, length in self._moves:
            done = 0
            while done < length:
                if not room:
                    yield
                    room = INLINE_MAX
                if self.stopped:
                    return
                count = min(length - done, room)
                memmove(target + done, source + done, count)
                if self._landed is not None:
                    self._tell(target + done, source + done, count)
                done += count
                room -= count

    def parts(self, count: int) -> list[list[Move]]:
        """The moves in `count` lists of about equal bytes."""
        pieces = [
            (target + start, source + start, min(PIECE_BYTES, length - start))
            for target, source, length in self._moves
            for start in range(0, length, PIECE_BYTES)
        ]
        return equal_parts(pieces, lambda piece: piece[2], count)


def equal_parts(pieces: Sequence[T], nbytes: Callable[[T], int], count: int) -> list[list[T]]:
    """Divides `pieces`, in order, into at most `count` parts of about equal bytes."""
    room = share = -(-sum(map(nbytes, pieces)) // count)
    parts: list[list[T]] = [[]]
    for piece in pieces:
        if room <= 0 and len(parts) < count:
            parts.append([])
            room = share
        parts[-1].append(piece)
        room -= nbytes(piece)
    return parts


class Copier:
    """The threads that copy."""

    def __init__(self) -> None:
        self._workers = min(4, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="copy")

    async def copy(self, copy: Copy, nbytes: int, urgent: bool = False) -> None:
        """Run `copy`, which moves `nbytes`. When this returns, raises or is cancelled, no byte of it moves any more."""
        if nbytes <= INLINE_MAX:
            copy.run()
            return
        if nbytes <= TURNS_MAX or urgent:
            for _ in copy.turns():
                await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        if nbytes < SPLIT_MIN or self._workers == 1:
            running = [loop.run_in_executor(self._pool, copy.run)]
        else:
            running = [loop.run_in_executor(self._pool, copy.run, part) for part in copy.parts(self._workers)]
        await all_ended(running, copy.stop)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


async def all_ended(running: Sequence[asyncio.Future[T]], stop: Callable[[], object] = lambda: None) -> list[T]:
    """The results of work in threads. If cancelled, this calls `stop`, waits until all have ended, then raises."""
    cancelled: asyncio.CancelledError | None = None
    while any(not one.done() for one in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()  # at most one piece remains: well under a millisecond
    if cancelled is not None:
        for one in running:
            one.exception()  # retrieved, so that asyncio does not log it
        raise cancelled
    return [one.result() for one in running]
