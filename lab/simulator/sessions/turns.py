"""The turns of sessions: their gaps are learned, and their blocks parked, by the classes of production.

As engine/front/sessions/ and cache/store/keeper.py do it, with one acceptor for all requests: predictions of
sched/sessions/, blocks of cache/sessions/ at the shares of the pool.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Protocol

from cache.sessions.parked import Times
from lab.simulator.models.loop import Loop
from lab.simulator.models.shares import HomedPool
from sched.sessions.gaps import SESSIONS_MAX, Gaps
from sched.sessions.parking import CLASSES, ParkingRules, choose

PUBLISHED_S = 1.0
"""As in engine/front/sessions/turns.py."""


class Turn(Protocol):
    """A lab.simulator.job.Job; `session` is -1 if it belongs to none."""

    session: int


class Turns:
    """`ways` counts the turns by the way of their blocks until the next one; those of sessions that were forgotten
    during a turn have none."""

    def __init__(self, loop: Loop, pool: HomedPool, rules: ParkingRules, sessions_max: int = SESSIONS_MAX) -> None:
        """sessions_max: remembered ones, see Gaps."""
        self._loop, self._pool, self._rules = loop, pool, rules
        self._gaps = Gaps(sessions_max)
        self._away: dict[int, Turn] = {}  # session -> its last turn, if that is over
        self.ways = Counter(dict.fromkeys(CLASSES, 0))

    def begun(self, job: Turn) -> None:
        """It has arrived."""
        if job.session >= 0:
            self._away.pop(job.session, None)
            self._gaps.arrived(self._loop.now, job.session)

    def over(self, job: Turn, blocks: list[int]) -> None:
        """It is answered, and has these full blocks."""
        if job.session < 0:
            return
        try:
            way = choose(self._gaps.left(self._loop.now, job.session), self._rules)
        except KeyError:  # others have begun since, and it was forgotten
            return
        self._away[job.session] = job
        times = Times(way.down_s, way.up_s, way.late_s, way.over_s)
        self._loop.after(PUBLISHED_S, self._tell, job, blocks, way.name, times)

    def _tell(self, job: Turn, blocks: list[int], name: str, times: Times) -> None:
        if self._away.get(job.session) is not job:  # it has returned
            return
        self.ways[name] += 1
        self._pool.park(self._loop.now, blocks, job.session, times)
        for after_s in (times.down_s, times.up_s, times.late_s, times.over_s):
            if after_s < math.inf:
                self._loop.after(after_s, self._look)

    def _look(self) -> None:
        self._pool.move_sessions(self._loop.now)
