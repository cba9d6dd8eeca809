"""S3-FIFO (Yang et al., SOSP 2023): three queues. Pure, O(1) amortised.

new ──> small (a tenth) ──used twice──> main ──unused for a round──> gone
          └──otherwise──> gone, its key to the ghost queue; a key that returns from there goes directly to main
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from cache.pool.policy import PLAIN, Facts

SMALL_SHARE = 0.1
MOST_USES = 3  # a counter of two bits
MOVE_USES = 2  # uses in the small queue that move an item to main


class S3FIFO:
    """The policy does not know the cache's size: shares refer to the present items, and the ghost queue remembers as
    many keys."""

    def __init__(self) -> None:
        self._small: OrderedDict[Hashable, None] = OrderedDict()  # oldest first; both may hold pinned items
        self._main: OrderedDict[Hashable, None] = OrderedDict()
        self._ghost: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[Hashable, int] = {}  # of all present items
        self._pinned: set[Hashable] = set()
        self._passed: set[Hashable] = set()  # pinned items that `victim` met and took out of their queue
        self._named: Hashable = None  # the last victim

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        self._uses[item] = 0
        if item in self._ghost:
            del self._ghost[item]
            self._main[item] = None
        else:
            self._small[item] = None

    def touched(self, item: Hashable) -> None:
        self._uses[item] = min(MOST_USES, self._uses[item] + 1)

    def pinned(self, item: Hashable) -> None:
        self._pinned.add(item)

    def unpinned(self, item: Hashable) -> None:
        self._pinned.remove(item)
        if item in self._passed:  # it was pinned at its turn
            self._passed.remove(item)
            self._main[item] = None

    def removed(self, item: Hashable) -> None:
        del self._uses[item]
        self._pinned.discard(item)
        self._passed.discard(item)
        self._main.pop(item, None)
        if item in self._small:
            del self._small[item]
            if item == self._named:
                self._ghost[item] = None
        while len(self._ghost) > len(self._uses):
            self._ghost.popitem(last=False)

    def victim(self) -> Hashable:
        while self._small or self._main:
            small = len(self._small) >= SMALL_SHARE * len(self._uses) or not self._main
            queue = self._small if small else self._main
            item = next(iter(queue))
            if item in self._pinned:
                del queue[item]
                self._passed.add(item)
            elif small and self._uses[item] >= MOVE_USES:
                del queue[item]
                self._uses[item] = 0
                self._main[item] = None
            elif not small and self._uses[item] > 0:
                self._uses[item] -= 1
                queue.move_to_end(item)
            else:
                self._named = item
                return item
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._uses) - len(self._pinned)
