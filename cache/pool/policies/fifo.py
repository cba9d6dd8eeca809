"""FIFO: evicts the oldest content first, regardless of its uses."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from cache.pool.policy import PLAIN, Facts


class FIFO:
    def __init__(self) -> None:
        self._arrivals: dict[Hashable, int] = {}
        self._queue: list[tuple[int, Hashable]] = []  # a heap; it may hold pinned or removed items
        self._pinned: set[Hashable] = set()
        self._passed: set[Hashable] = set()  # pinned items that `victim` met and took out of the queue
        self._count = 0

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        self._count += 1
        self._arrivals[item] = self._count
        if len(self._queue) > 64 + 2 * len(self._arrivals):  # most of them were removed
            self._queue = [pair for pair in self._queue if self._arrivals.get(pair[1]) == pair[0]]
            heapify(self._queue)
        self._queue.append((self._count, item))  # appending the largest item keeps the heap valid

    def touched(self, item: Hashable) -> None:
        pass

    def pinned(self, item: Hashable) -> None:
        self._pinned.add(item)

    def unpinned(self, item: Hashable) -> None:
        self._pinned.remove(item)
        if item in self._passed:
            self._passed.remove(item)
            heappush(self._queue, (self._arrivals[item], item))

    def removed(self, item: Hashable) -> None:
        del self._arrivals[item]
        self._pinned.discard(item)
        self._passed.discard(item)

    def victim(self) -> Hashable:
        while self._queue:
            number, item = self._queue[0]
            if self._arrivals.get(item) != number:
                heappop(self._queue)
            elif item in self._pinned:
                heappop(self._queue)
                self._passed.add(item)
            else:
                return item
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._arrivals) - len(self._pinned)
