"""Which blocks of other sites are copied to this one, and for how long the copies stay: the rules of a CDN. Pure.

    admission   a block that crosses for the first time is used once; one that crosses again within the TTL becomes a
                copy, because most content of a cache is never asked for twice (second hit: Maggs and Sitaraman, 2015)
    TTL         a copy that nobody reads for one TTL leaves its home; each read begins the TTL again
    own         a copy that is computed at this site too becomes an ordinary block without a TTL

`SecondHit` runs at the node that reads from another site, `ExpiringCopies` at the home of the copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""A block key; in the simulator a number."""

KEYS_MAX = 1 << 16  # maximum number of remembered first hits; above it, the oldest are forgotten


class SecondHit(Generic[Key]):
    """Admission of copies at one node. Memory is bounded by `keys_max` keys."""

    def __init__(self, ttl_s: float, keys_max: int = KEYS_MAX) -> None:
        """Raises ValueError unless both are above zero."""
        if not ttl_s > 0 or keys_max < 1:
            raise ValueError(f"a copy needs a time to live above 0 s and some keys, not {ttl_s} s and {keys_max}")
        self.ttl_s = ttl_s
        self._keys_max = keys_max
        self._seen: OrderedDict[Key, float] = OrderedDict()  # time of the last crossing, oldest first

    def crossed(self, now: float, keys: Sequence[Key]) -> list[bool]:
        """These blocks have come from another site. Returns which of them become copies."""
        admitted = []
        for key in keys:
            before = self._seen.pop(key, None)
            self._seen[key] = now
            admitted.append(before is not None and now - before < self.ttl_s)
        while len(self._seen) > self._keys_max:
            self._seen.popitem(last=False)
        return admitted

    def forget(self, keys: Iterable[Key]) -> None:
        """These were computed at this site."""
        if self._seen:
            for key in keys:
                self._seen.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        """Whether this block has crossed, as far as that is remembered."""
        return key in self._seen

    def __len__(self) -> int:
        return len(self._seen)


class ExpiringCopies(Generic[Key]):
    """The copies of one home."""

    def __init__(self) -> None:
        self._copies: dict[Key, tuple[float, float, int]] = {}  # end, TTL, number of its entry below
        self._order: list[tuple[float, int, Key]] = []  # heap of entries (end, number, key); ends may have moved since
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._copies)

    def arrived(self, now: float, keys: Iterable[Key], ttl_s: float) -> None:
        """These are copies with that TTL; one that is here already keeps the longer one."""
        for key in keys:
            end, longest_s, number = self._copies.get(key, (0.0, 0.0, -1))
            if number < 0:
                number = next(self._numbers)
                heappush(self._order, (now + ttl_s, number, key))
            self._copies[key] = (max(end, now + ttl_s), max(longest_s, ttl_s), number)

    def own(self, keys: Iterable[Key]) -> None:
        """These were computed at this site."""
        if self._copies:
            for key in keys:
                self._copies.pop(key, None)

    def used(self, now: float, keys: Iterable[Key]) -> None:
        """These were read."""
        if self._copies:
            for key in keys:
                if (copy := self._copies.get(key)) is not None and now < copy[0]:
                    self._copies[key] = (now + copy[1], *copy[1:])

    def expired(self, now: float) -> list[Key]:
        """The copies whose TTL is over; they are forgotten here, and their home must remove them."""
        over = []
        while self._order and self._order[0][0] <= now:
            _, number, key = heappop(self._order)
            end, _, present = self._copies.get(key, (0.0, 0.0, -1))
            if present != number:
                continue  # it left, and perhaps returned with an entry of its own
            if end <= now:
                del self._copies[key]
                over.append(key)
            else:
                heappush(self._order, (end, number, key))
        return over
