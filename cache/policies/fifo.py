"""FIFO: oldest content first, however often it was used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from cache.policy import PLAIN, Facts


class FIFO:
    def __init__(self) -> None:
        self._queue: OrderedDict[Hashable, None] = OrderedDict()  # oldest first; may hold pinned items
        self._pinned: set[Hashable] = set()
        self._passed: set[Hashable] = set()  # pinned items that `victim` met and took out of the queue

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        self._queue[item] = None

    def touched(self, item: Hashable) -> None:
        pass

    def pinned(self, item: Hashable) -> None:
        self._pinned.add(item)

    def unpinned(self, item: Hashable) -> None:
        self._pinned.remove(item)
        if item in self._passed:  # it was older than all that is left in the queue
            self._passed.remove(item)
            self._queue[item] = None
            self._queue.move_to_end(item, last=False)

    def removed(self, item: Hashable) -> None:
        self._queue.pop(item, None)
        self._pinned.discard(item)
        self._passed.discard(item)

    def victim(self) -> Hashable:
        while self._queue:
            item = next(iter(self._queue))
            if item not in self._pinned:
                return item
            del self._queue[item]
            self._passed.add(item)
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._queue) + len(self._passed) - len(self._pinned)
