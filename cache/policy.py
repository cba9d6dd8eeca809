"""Eviction policies: in which order cached content goes. Pure and O(1) per call.

A policy sees the life of every item (a slot of a pool, a key of the SSD tier):

    added ──> [pinned <──> unpinned, touched] ──> removed

`added` makes it evictable, `pinned` takes it out of reach while somebody uses it, `victim` names who goes next
without removing it. A new policy is one class and one entry of `policies`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol


class EvictionPolicy(Protocol):
    """What a pool or tier asks of its policy. Calls follow the life drawn above; any other order is undefined."""

    def added(self, item: Hashable) -> None:
        """New content, evictable from now on."""

    def touched(self, item: Hashable) -> None:
        """A hit on content that stays where it is; pinned or not."""

    def pinned(self, item: Hashable) -> None:
        """In use: no victim until `unpinned`."""

    def unpinned(self, item: Hashable) -> None:
        """No longer in use: evictable again."""

    def removed(self, item: Hashable) -> None:
        """Content is gone, whether it was pinned or not."""

    def victim(self) -> Hashable:
        """The evictable item that should go next. Raises LookupError when nothing is evictable."""

    def __len__(self) -> int:
        """How many items are evictable."""


class LRU:
    """Least recently used; the end of a use counts as the use."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[Hashable, None] = OrderedDict()  # oldest first

    def added(self, item: Hashable) -> None:
        self._evictable[item] = None

    def touched(self, item: Hashable) -> None:
        if item in self._evictable:
            self._evictable.move_to_end(item)

    def pinned(self, item: Hashable) -> None:
        del self._evictable[item]

    def unpinned(self, item: Hashable) -> None:
        self._evictable[item] = None

    def removed(self, item: Hashable) -> None:
        self._evictable.pop(item, None)

    def victim(self) -> Hashable:
        for item in self._evictable:
            return item
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._evictable)


class FIFO:
    """Oldest content first, however often it was used."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Hashable, None] = OrderedDict()  # oldest first; may hold pinned items
        self._pinned: set[Hashable] = set()
        self._passed: set[Hashable] = set()  # pinned items that `victim` met and took out of the queue

    def added(self, item: Hashable) -> None:
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


policies: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "fifo": FIFO}
