"""Aside: content that a pool evicts before all other, because it is known to be wanted late or never. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count

from cache.block import BlockKey

USED_MAX = 16
"""Blocks in use that one search passes; they are looked at again at the next one."""


class Aside:
    """Keys with the time at which each is wanted; the one that is wanted last is evicted first, the oldest among
    equals. O(log n) per key and per search, amortised."""

    def __init__(self) -> None:
        self._numbers: dict[BlockKey, int] = {}
        self._order: list[tuple[float, int, BlockKey]] = []  # a heap of (-time, number, key)
        self._count = count()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._numbers

    def add(self, rows: Iterable[tuple[BlockKey, float]]) -> None:
        """Put aside; a key that is there gets the new time."""
        for key, wanted_at in rows:
            number = self._numbers[key] = next(self._count)
            heappush(self._order, (-wanted_at, number, key))
        if len(self._order) > 64 + 2 * len(self._numbers):  # mostly of keys that were wanted since
            self._order = [entry for entry in self._order if self._numbers.get(entry[2]) == entry[1]]
            heapify(self._order)

    def discard(self, key: BlockKey) -> None:
        """It is wanted, or gone."""
        self._numbers.pop(key, None)

    def first(self, in_use: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The key to evict first; None if there is none that is not in use."""
        passed: list[tuple[float, int, BlockKey]] = []
        found = None
        while self._order and len(passed) < USED_MAX:
            entry = self._order[0]
            if self._numbers.get(entry[2]) != entry[1]:
                heappop(self._order)
            elif in_use(entry[2]):
                passed.append(heappop(self._order))
            else:
                found = entry[2]
                break
        for entry in passed:
            heappush(self._order, entry)
        return found
