"""The interface of eviction policies, and LRU, the default. Pure.

A policy sees the life of every item (a block key of a pool or of the SSD tier):

    added ──> [pinned <──> unpinned, touched] ──> removed

`added` makes it evictable, `touched` is a hit, `pinned` protects it while it is in use, `victim` names the next item to
evict without removing it. The other policies and their table are in cache/pool/policies/.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts of a block when it enters; policies use those that they need. All blocks of a pool have the same
    size, so ranking by seconds per block equals ranking by seconds per byte."""

    position: int = 0  # in its prompt: 0 = the first block
    cost_s: float = 1.0  # estimated time to compute it again if its predecessors are cached; only ratios count
    service_class: str = ""  # of the request that brought it


PLAIN = Facts()
"""Nothing is known."""

OBJECTS = Facts(service_class="objects")
"""Facts of values and objects that programs store: they cannot be recomputed, so admission never refuses them."""


class EvictionPolicy(Protocol):
    """The calls of a pool or tier to its policy. Calls follow the order drawn above; any other order is undefined.
    Each is O(1) or O(log n), amortised."""

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
        """New content, evictable from now on."""

    def touched(self, item: Hashable) -> None:
        """A hit on content that stays where it is; pinned or not."""

    def pinned(self, item: Hashable) -> None:
        """In use: not a victim until `unpinned`. Not a hit by itself, because transfers pin too."""

    def unpinned(self, item: Hashable) -> None:
        """No longer in use: evictable again."""

    def removed(self, item: Hashable) -> None:
        """The content is gone, whether or not it was pinned, and whether or not it was the victim."""

    def victim(self) -> Hashable:
        """The evictable item to evict next. Raises LookupError when nothing is evictable."""

    def __len__(self) -> int:
        """The number of evictable items."""


@runtime_checkable
class Sharing(Protocol):
    """A policy that divides the room among classes also hears of blocks that are in use and not evictable yet."""

    def took(self, service_class: str) -> None:
        """One more block is in use for that class, or holds its content."""

    def gave(self, service_class: str) -> None:
        """One block less is in use for that class."""

    def victim_for(self, service_class: str) -> Hashable | None:
        """The class that must evict for a new block of `service_class`, which is not counted yet; None if there is
        room."""


class LRU:
    """Evicts the least recently used item; the end of a use counts as the use."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[Hashable, None] = OrderedDict()  # oldest first

    def added(self, item: Hashable, facts: Facts = PLAIN) -> None:
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
