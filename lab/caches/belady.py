"""Belady's policy: evicts the content that is needed last. It knows the whole trace, so it is a bound and not a usable
policy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

from cache.pool.policy import PLAIN, Facts
from lab.loads.trace import TraceRow

NEVER = 1 << 60


class Belady:
    """For `replay` over the same rows: every added or touched block is the next access of the trace. A request accesses
    its blocks from the last to the first."""

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        accesses = [block for row in rows for block in reversed(row.hash_ids)]
        self._next_use = [NEVER] * len(accesses)  # next use of the block accessed at each time
        later: dict[int, int] = {}
        for time in range(len(accesses) - 1, -1, -1):
            self._next_use[time] = later.get(accesses[time], NEVER + accesses[time])
            later[accesses[time]] = time
        self._time = 0
        self._due: dict[Hashable, int] = {}
        self._heap: list[tuple[int, Hashable]] = []  # (-next use, block); stale if it differs from _due

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        due = self._next_use[self._time]
        self._time += 1
        self._due[item] = due
        heappush(self._heap, (-due, item))

    def touched(self, item: Hashable) -> None:
        self.added(item)

    def pinned(self, item: Hashable) -> None:
        raise NotImplementedError("a bound for traces, which pin no blocks")

    unpinned = pinned

    def removed(self, item: Hashable) -> None:
        del self._due[item]

    def victim(self) -> Hashable:
        while self._heap:
            due, item = self._heap[0]
            if self._due.get(item) == -due:
                return item
            heappop(self._heap)
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._due)
