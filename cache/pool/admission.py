"""Admission: which blocks a full pool accepts at the cost of evicting another. Pure, O(1).

Eviction says who goes; admission whether the newcomer is worth it. It is asked only when something would be evicted:
what fits is always taken. `wanted` reports every use and every offer of a key, `admits` decides on one offer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from cache.pool.policy import Facts
from net.user_file import is_file, load

REMEMBERED_KEYS = 1 << 16
"""Keys that a history looks back on: those of a pool of about that many blocks."""


class Admission(Protocol):
    def wanted(self, key: Hashable) -> None:
        """`key` is used or offered. Call this before `admits` for the same offer."""

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        """May `key` come in, and `victim` go?"""


class Always:
    def wanted(self, key: Hashable) -> None:
        pass

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return True


class History:
    """Which keys were wanted lately: two sets that take turns, so the last `size` to `2 * size` different ones."""

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._size = size
        self._young: set[Hashable] = set()
        self._old: set[Hashable] = set()

    def add(self, key: Hashable) -> None:
        if len(self._young) >= self._size and key not in self._young:
            self._old, self._young = self._young, set()
        self._young.add(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._young or key in self._old


class SecondHit:
    """A block comes in when it is offered for the second time: most are never used again."""

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._history = History(size)
        self._again = False  # the key wanted last was known before

    def wanted(self, key: Hashable) -> None:
        self._again = key in self._history
        self._history.add(key)

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return self._again


class ClassAware:
    """Blocks of batch work come in at their second use only; those of people who wait come in at once."""

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._second_hit = SecondHit(size)

    def wanted(self, key: Hashable) -> None:
        self._second_hit.wanted(key)

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return facts.service_class != "batch" or self._second_hit.admits(key, facts, victim)


class TinyLFU:
    """A block comes in when it was wanted more often than the victim lately (Einziger et al., ACM ToS 2017).

    Counts live in a count-min sketch of 4 rows with 4-bit counters (15 at most); after `10 * size` increments all are
    halved, so old fame fades.
    """

    ROWS = 4
    MOST = 15

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._width = max(16, 1 << (size - 1).bit_length())
        self._rows = [bytearray(self._width) for _ in range(self.ROWS)]
        self._sample = 10 * size
        self._increments = 0

    def wanted(self, key: Hashable) -> None:
        for row, place in zip(self._rows, self._places(key), strict=True):
            row[place] = min(self.MOST, row[place] + 1)
        self._increments += 1
        if self._increments >= self._sample:
            self._rows = [bytearray(count >> 1 for count in row) for row in self._rows]
            self._increments //= 2

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return self.count(key) > self.count(victim)

    def count(self, key: Hashable) -> int:
        """How often `key` was wanted; too high by chance, never too low but for the halving and the limit."""
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: Hashable) -> list[int]:
        bits = hash((key, "tinylfu"))
        return [(bits >> (16 * row)) % self._width for row in range(self.ROWS)]


admissions: dict[str, Callable[[], Admission]] = {
    "always": Always,
    "second-hit": SecondHit,
    "tinylfu": TinyLFU,
    "class-aware": ClassAware,
}


def choose(name: str) -> Admission:
    """A new one called `name`, or the user's own from 'FILE.py:NAME'. Raises ValueError."""
    if is_file(name):
        made: Admission = load("--cache-admission", name, ("wanted", "admits"))()
        return made
    if name not in admissions:
        raise ValueError(f"no cache admission {name!r}; choose {', '.join(admissions)} or FILE.py:NAME")
    return admissions[name]()
