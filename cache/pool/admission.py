"""Admission: which blocks a full pool accepts at the cost of evicting another. Pure, O(1).

Eviction names the victim; admission decides whether the new block is worth more. The pool asks only if it would have to
evict: a block that fits is always accepted. `wanted` reports every use and every offer of a key, `admits` decides on
one offer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from cache.pool.policy import Facts
from net.user_file import is_file, load

REMEMBERED_KEYS = 1 << 16
"""Keys that a history remembers; enough for a pool of about as many blocks."""


class Admission(Protocol):
    def wanted(self, key: Hashable) -> None:
        """`key` is used or offered. Call this before `admits` for the same offer."""

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        """Whether `key` may enter the pool and evict `victim`."""


class Always:
    def wanted(self, key: Hashable) -> None:
        pass

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return True


class History:
    """The recently wanted keys: two sets that take turns hold the last `size` to `2 * size` different ones."""

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
    """Admits a block when it is offered for the second time: most blocks are never used again."""

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._history = History(size)
        self._again = False  # the last wanted key was known already

    def wanted(self, key: Hashable) -> None:
        self._again = key in self._history
        self._history.add(key)

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return self._again


class ClassAware:
    """Admits blocks of batch work at their second use only, and blocks of interactive requests at their first."""

    def __init__(self, size: int = REMEMBERED_KEYS) -> None:
        self._second_hit = SecondHit(size)

    def wanted(self, key: Hashable) -> None:
        self._second_hit.wanted(key)

    def admits(self, key: Hashable, facts: Facts, victim: Hashable) -> bool:
        return facts.service_class != "batch" or self._second_hit.admits(key, facts, victim)


class TinyLFU:
    """Admits a block that was recently wanted more often than the victim (Einziger et al., ACM ToS 2017).

    A count-min sketch of 4 rows holds 4-bit counters (at most 15). All counters are halved after `10 * size`
    increments, so old uses lose weight.
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
        """The number of times that `key` was wanted. Collisions may make it too high; only the halving and the limit
        make it too low."""
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
    """A new admission policy called `name`, or the user's class from 'FILE.py:NAME'. Raises ValueError."""
    if is_file(name):
        made: Admission = load("--cache-admission", name, ("wanted", "admits"))()
        return made
    if name not in admissions:
        raise ValueError(f"--cache-admission must be one of {', '.join(admissions)}, or FILE.py:NAME, got {name!r}")
    return admissions[name]()
