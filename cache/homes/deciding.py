"""DecidingWalk: the steps of a put whose keys do not identify their content, so that the homes have to agree. Pure.

One home decides: the first in the ranking that answers. Its value is copied to the other homes, which accept no other
new value. All writers ask the same home first, so its first value is the first for all of them, as long as they see the
same members and it answers. If it does not answer, the next home decides. If two homes have decided, their contents
meet later, and one of them stays (cache/homes/agreement.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.block import BlockKey
from cache.homes.rendezvous import ranking
from cache.homes.routing import SPARES, Router, Target, Waves
from cache.protocol import STORED


class DecidingWalk(Waves):
    """The walk of one put over `positions`. `replicas`: copies of each block, if more than usual."""

    def __init__(self, router: Router, keys: Sequence[BlockKey], positions: Iterable[int], replicas: int = 0) -> None:
        super().__init__()
        count = max(router.replicas, replicas)
        self._copies = count - 1
        self._homes: dict[int, list[str]] = {}
        self._left: dict[int, list[str]] = {}  # homes not asked yet, best first
        self._failed: dict[int, str] = {}  # the first home that failed
        self._decided: dict[int, str] = {}
        self.owed: dict[str, list[int]] = {}  # deciding home -> positions whose copies are missing
        for position in positions:
            wide = ranking(keys[position], router.members, count + SPARES)
            self._homes[position], self._left[position] = wide[:count], wide[1:]
            if wide:
                self.again(position, Target(wide[0], wait=len(wide) == 1))

    def settled(self, position: int, target: Target, answer: int) -> None:
        """The target has stored this value (STORED), or has another value."""
        if target.copy or answer != STORED:
            return
        self._decided[position] = target.home
        left = self._left[position]
        for _ in range(self._copies):
            if not left:
                self.owed.setdefault(target.home, []).append(position)
                return
            home = left.pop(0)
            owner = "" if home in self._homes[position] else self._failed.get(position, "")
            self.again(position, Target(home, owner, copy=True))

    def failed(self, position: int, target: Target, *, full: bool) -> None:
        """The target has no room (`full`) or does not answer: the next member in the ranking keeps the value for it."""
        if target.wait:
            return
        ours = target.home in self._homes[position]
        if ours:
            self._failed.setdefault(position, target.home)
        owner = target.home if ours else target.owner
        left = self._left[position]
        if left:
            self.again(position, Target(left.pop(0), owner, copy=target.copy))
        elif target.copy:
            self.owed.setdefault(self._decided[position], []).append(position)
        elif full:
            self.again(position, Target(target.home, target.owner, wait=True))
