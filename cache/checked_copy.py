"""Copies blocks from memory that others may change, and computes the checksum of the copy.

C code does both in one pass (cache/block_copy.py). Without it, a piece is hashed while it is still in the core's
cache, so the checksum costs little compared with the copy. Small calls run on the event loop, larger calls in several
turns of it, and the largest in threads. The threads share the blocks. For a single block without the C code, one thread
copies and another hashes, piece by piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import memmove
from functools import partial
from threading import Event
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from cache.block_copy import SHORT_BYTES, BlockCopy
from cache.copy_threads import CopyThreads
from net.transfer.common.copying import equal_parts

PIECE_BYTES = 256 << 10  # bytes that are copied, then hashed
TURN_BYTES = 512 << 10  # copied on the event loop between two turns, about 0.15 ms
ON_LOOP_BYTES = 2 << 20  # copied in turns on the loop; more goes to a thread, which costs 0.1 to 0.2 ms
FEW, FEW_BYTES = 2, 16 << 10  # blocks and bytes for which preparing the C call takes longer than two passes
SPLIT_BYTES = 4 << 20  # a second thread hashes a single block of at least this size
SPLIT_PIECE = 2 << 20


class Copy(NamedTuple):
    """One block: its source, and its target as an address and as memory."""

    source: int
    target: int
    memory: memoryview


class CheckedCopier:
    """The owner passes the copy `threads`; this object owns the hash threads. `code` may be set at any time."""

    def __init__(self, threads: CopyThreads, code: BlockCopy | None = None) -> None:
        self.code = code
        self._threads = threads
        self._hashers: ThreadPoolExecutor | None = None

    async def copy(self, copies: Sequence[Copy]) -> list[int]:
        """Copies blocks; returns the checksum of each copy. Source and target must stay mapped until this returns or
        raises; it writes nothing after that."""
        nbytes = nbytes_of(copies)
        if nbytes > ON_LOOP_BYTES:
            return await self._in_threads(copies, nbytes)
        totals: list[int] = []
        room = TURN_BYTES
        for count in _steps(copies, totals, self.code):
            room -= count
            if room <= 0 < nbytes - TURN_BYTES:
                await asyncio.sleep(0)
                room = TURN_BYTES
        return totals

    def copy_now(self, copies: Sequence[Copy]) -> list[int]:
        """The same for few bytes, without a turn of the event loop."""
        totals: list[int] = []
        for _ in _steps(copies, totals, self.code):
            pass
        return totals

    async def _in_threads(self, copies: Sequence[Copy], nbytes: int) -> list[int]:
        count = self._threads.count
        works: list[Callable[[Event], list[int]]]
        if len(copies) == 1 and nbytes >= SPLIT_BYTES and count > 1 and self.code is None:
            if self._hashers is None:
                self._hashers = ThreadPoolExecutor(count, thread_name_prefix="hash-checked")
            works = [partial(_piped, copies[0], self._hashers)]
        else:
            parts = equal_parts(copies, lambda one: len(one.memory), count)
            works = [partial(_all, part, self.code) for part in parts]
        return [total for totals in await self._threads.run(works) for total in totals]

    def close(self) -> None:
        if self._hashers is not None:
            self._hashers.shutdown(wait=True)


def nbytes_of(copies: Sequence[Copy]) -> int:
    return sum(len(one.memory) for one in copies)


def _steps(copies: Sequence[Copy], totals: list[int], code: BlockCopy | None) -> Iterator[int]:
    """Copy and hash; yields the bytes of each step after it."""
    if code is not None and (len(copies) > FEW or nbytes_of(copies) > FEW_BYTES):
        for some in _groups(copies):
            totals += _in_one_pass(code, some)
            yield nbytes_of(some)
        return
    for source, target, memory in copies:
        nbytes = len(memory)
        if nbytes <= PIECE_BYTES:
            memmove(target, source, nbytes)
            totals.append(xxh3_64_intdigest(memory))
            yield nbytes
            continue
        total = xxh3_64()
        for start in range(0, nbytes, PIECE_BYTES):
            count = min(PIECE_BYTES, nbytes - start)
            memmove(target + start, source + start, count)
            total.update(memory[start : start + count])
            yield count
        totals.append(total.intdigest())


def _groups(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """The copies, in order, in groups of about TURN_BYTES."""
    first = nbytes = 0
    for at, one in enumerate(copies):
        nbytes += len(one.memory)
        if nbytes >= TURN_BYTES:
            yield copies[first : at + 1]
            first, nbytes = at + 1, 0
    if first < len(copies):
        yield copies[first:]


def _in_one_pass(code: BlockCopy, copies: Sequence[Copy]) -> list[int]:
    sources, targets, memories = zip(*copies, strict=True)
    sums = code.copy(sources, targets, list(map(len, memories)))
    rows = zip(sums, memories, strict=True)
    return [total if len(memory) > SHORT_BYTES else xxh3_64_intdigest(memory) for total, memory in rows]


def _all(copies: Sequence[Copy], code: BlockCopy | None, stop: Event) -> list[int]:
    totals: list[int] = []
    for _ in _steps(copies, totals, code):
        if stop.is_set():
            break
    return totals


def _piped(one: Copy, hashers: ThreadPoolExecutor, stop: Event) -> list[int]:
    """Copies in this thread, and hashes one piece behind in another thread."""
    total = xxh3_64()
    hashing: Future[None] | None = None
    for start in range(0, len(one.memory), SPLIT_PIECE):
        if stop.is_set():
            break
        count = min(SPLIT_PIECE, len(one.memory) - start)
        memmove(one.target + start, one.source + start, count)
        if hashing is not None:
            hashing.result()
        hashing = hashers.submit(total.update, one.memory[start : start + count])
    if hashing is not None:
        hashing.result()
    return [total.intdigest()]
