"""ParkedBlocks: what happens to the blocks of sessions at their home, and when. Pure.

An acceptor tells the homes at the end of a turn when the session's blocks move down, up, and are over
(sched/sessions/parking.py): then they are dropped as soon as the tier is nearly full, and not before, because some
sessions return late, and room that nobody wants is worth nothing. A block that is read is not parked any more, until a
turn that has it is over. Blocks that two sessions have, such as those of a system prompt, are never parked: a session
knows nothing of the returns of others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""A block key; in the simulator a number."""

OWNERS_MAX = 1 << 18
"""Blocks of which the session is remembered; above it, the oldest are forgotten."""

PARKED_AT_ONCE = 256
"""Blocks that acceptors name, and homes park, between two turns of the event loop: about 0.5 ms."""

SHARED = -1


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from now, infinite = never: when blocks move down, up and down again, and when they are over: from then
    on they are dropped before the tier is full."""

    down_s: float
    up_s: float
    late_s: float
    over_s: float


@dataclass(slots=True)
class Due(Generic[Key]):
    """What is due now. `down`: blocks that DRAM evicts first, with the seconds until they are wanted. `up`: blocks that
    will soon be read, with the seconds for which they wait for that."""

    down: list[tuple[Key, float]] = field(default_factory=list)
    up: list[tuple[Key, float]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.down or self.up)


TIMES = DOWN, UP, LATE, OVER = "down", "up", "late", "over"


@dataclass(slots=True, eq=False)
class _Visit(Generic[Key]):
    """The blocks of one turn that are still parked."""

    keys: dict[Key, None]
    times: Times
    begin: float


class ParkedBlocks(Generic[Key]):
    """The parked blocks of one home."""

    def __init__(self, owners_max: int = OWNERS_MAX) -> None:
        self._visit_of: dict[Key, _Visit[Key]] = {}
        self._owners: OrderedDict[Key, int] = OrderedDict()
        self._owners_max = owners_max
        self._order: list[tuple[float, int, str, _Visit[Key]]] = []  # a heap
        self._numbers = count()
        self._over: dict[Key, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._visit_of)

    @property
    def num_over(self) -> int:
        """Blocks that `over` would name."""
        return len(self._over)

    def over(self, most: int) -> list[Key]:
        """Up to `most` blocks of sessions that hardly return, the oldest ones. They are forgotten here, and their home
        must remove them."""
        found = list(islice(self._over, most))
        for key in found:
            del self._over[key]
        return found

    def park(self, now: float, keys: Sequence[Key], session: int, times: Times) -> None:
        """A turn of this session (a number from 0 on), which has these blocks, is over."""
        own = [key for key in keys if self._is_own(key, session)]
        self.used(own)
        if not own:
            return
        visit = _Visit(dict.fromkeys(own), times, now)
        self._visit_of |= dict.fromkeys(own, visit)
        for after_s, what in zip((times.down_s, times.up_s, times.late_s, times.over_s), TIMES, strict=True):
            if after_s < math.inf:
                heappush(self._order, (now + after_s, next(self._numbers), what, visit))
        if len(self._order) > 64 + 2 * len(TIMES) * len(self._visit_of):  # half of blocks that are not parked any more
            self._order = [entry for entry in self._order if entry[3].keys]
            heapify(self._order)

    def used(self, keys: Iterable[Key]) -> None:
        """These were read, or are gone: they are not parked any more."""
        for key in keys if self._visit_of or self._over else ():
            self._over.pop(key, None)
            if (visit := self._visit_of.pop(key, None)) is not None:
                del visit.keys[key]

    def due(self, now: float) -> Due[Key]:
        """What is due. Of several times of a block that have passed, the last one counts."""
        last: dict[_Visit[Key], str] = {}
        while self._order and self._order[0][0] <= now:
            _, _, what, visit = heappop(self._order)
            last[visit] = what
        due = Due[Key]()
        for visit, what in last.items():
            if what == UP:
                due.up += [(key, visit.begin + visit.times.late_s - now) for key in visit.keys]
            elif what == OVER:
                due.down += [(key, math.inf) for key in visit.keys]
                over = dict.fromkeys(visit.keys)
                self.used(over)
                self._over |= over
            else:
                wanted_s = visit.begin + visit.times.up_s - now if what == DOWN else math.inf
                due.down += [(key, wanted_s) for key in visit.keys]
        return due

    def _is_own(self, key: Key, session: int) -> bool:
        before = self._owners.pop(key, session)
        owner = session if before == session else SHARED
        self._owners[key] = owner
        while len(self._owners) > self._owners_max:
            self._owners.popitem(last=False)
        if owner == SHARED:
            self.used([key])
        return owner != SHARED
