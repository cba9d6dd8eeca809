"""Policies that evict the smallest rank: LFU, length-aware, cost-aware. Pure.

One heap with late re-ranking: a use only raises an item's rank, so the heap may keep the old, smaller rank, and
`victim` corrects it when the item reaches the top. A hit is O(1), an eviction O(log n), amortised.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from cache.pool.policy import PLAIN, Facts

Rank = tuple[float, ...]


@dataclass(slots=True)
class Entry:
    facts: Facts
    uses: int
    rank: Rank
    pinned: bool = False
    queued: bool = True  # the heap contains the item


class Ranked:
    """Subclasses define the rank. It must never fall while the item is cached, and no two items may have the same rank.
    The clock `self.tick`, which counts uses, as the last part of the rank ensures both and breaks ties by the age of
    the last use."""

    def __init__(self) -> None:
        self.tick = 0
        self._entries: dict[Hashable, Entry] = {}
        self._heap: list[tuple[Rank, Hashable, Entry]] = []
        self._num_pinned = 0

    def rank(self, facts: Facts, uses: int) -> Rank:
        """The rank of an item whose use number `uses` happens now; the first use is when it is added."""
        raise NotImplementedError

    def evicting(self, rank: Rank) -> None:
        """Called when the item of this rank is the next victim."""

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        self.tick += 1
        self._entries[item] = entry = Entry(facts, 1, self.rank(facts, 1))
        heappush(self._heap, (entry.rank, item, entry))
        if len(self._heap) > 2 * len(self._entries) + 64:  # mostly of items that were removed before their turn
            self._heap = [(e.rank, i, e) for i, e in self._entries.items() if e.queued]
            heapify(self._heap)

    def touched(self, item: Hashable) -> None:
        self.tick += 1
        entry = self._entries[item]
        entry.uses += 1
        entry.rank = self.rank(entry.facts, entry.uses)

    def pinned(self, item: Hashable) -> None:
        self._entries[item].pinned = True
        self._num_pinned += 1

    def unpinned(self, item: Hashable) -> None:
        self.tick += 1  # the end of a use renews its time, but is no second use
        entry = self._entries[item]
        entry.rank = self.rank(entry.facts, entry.uses)
        entry.pinned = False
        self._num_pinned -= 1
        if not entry.queued:
            entry.queued = True
            heappush(self._heap, (entry.rank, item, entry))

    def removed(self, item: Hashable) -> None:
        entry = self._entries.pop(item)
        self._num_pinned -= entry.pinned

    def victim(self) -> Hashable:
        heap = self._heap
        while heap:
            rank, item, entry = heap[0]
            if self._entries.get(item) is not entry:
                heappop(heap)
            elif entry.pinned:
                entry.queued = False
                heappop(heap)
            elif rank != entry.rank:
                heapreplace(heap, (entry.rank, item, entry))
            else:
                self.evicting(rank)
                return item
        raise LookupError("nothing is evictable")

    def __len__(self) -> int:
        return len(self._entries) - self._num_pinned


class LFU(Ranked):
    """Evicts the item with the fewest uses since it was added; among equals, the least recently used one."""

    def rank(self, facts: Facts, uses: int) -> Rank:
        return (uses, self.tick)


class LengthAware(Ranked):
    """LFU that evicts later blocks of a prompt first among equals (Mooncake, arXiv 2407.00079, table 1)."""

    def rank(self, facts: Facts, uses: int) -> Rank:
        return (uses, -facts.position, self.tick)


class CostAware(Ranked):
    """GreedyDual-Size-Frequency (Cherkasova, 1998): rank = L + uses * cost / size, where L is the rank of the last
    victim, so that an item with many old uses does not stay forever. Cost is the time to compute the block again."""

    def __init__(self) -> None:
        super().__init__()
        self._level = 0.0  # L

    def rank(self, facts: Facts, uses: int) -> Rank:
        return (self._level + uses * facts.cost_s, self.tick)

    def evicting(self, rank: Rank) -> None:
        self._level = rank[0]
