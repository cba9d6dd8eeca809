"""Members of one kind, nodes of a role or ranks of a node, that start and leave with the need for them. Pure.

    start   need > ready + coming for out_s: all that are missing
    drain   spare < ready for in_s, in_s after the last change: all that can be spared
    stop    a drained member has left, or a started one was not ready in time

`need` are the members for the load, `spare` those for a little more (sched/scaling/need.py). A member that starts
counts only when it is ready, and a draining one no more; but until it has left, it is one of the `most` that may run.
Only members that a start named are drained, so those that people started stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sched.classes import ServiceClass
from sched.scaling.bounds import Bounds

LONGEST_PAUSE_S = 600.0
"""Longest pause after starts that failed; each further failure doubles it. Starts that were asked for together and fail
together count once."""


@dataclass(frozen=True, slots=True)
class Start:
    """A member of this role and name should join."""

    role: str
    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """This member should leave without dropping a request."""

    role: str
    node: str


@dataclass(frozen=True, slots=True)
class Stop:
    """This member has left, or was never ready (`late`): what it ran on is free."""

    role: str
    node: str
    late: bool = False


Effect = Start | Drain | Stop


@dataclass(frozen=True, slots=True)
class Rules:
    """How many there may be of each role, for which objective, and how fast. `out_s`, `in_s`: how long more or fewer
    members must be needed; `start_s`: longest time from a start to a ready member."""

    bounds: tuple[Bounds, ...]
    objective: ServiceClass
    out_s: float
    in_s: float
    start_s: float


@dataclass(frozen=True, slots=True)
class Present:
    """A member that is not known to be dead."""

    name: str
    ready: bool
    draining: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is capacity."""
        return self.ready and not self.draining


class Crew:
    """The members of one role. `prefix`: names that a start makes are this and a number."""

    def __init__(self, bounds: Bounds, rules: Rules, prefix: str) -> None:
        self.bounds = bounds
        self.counts = {"needed": bounds.least, "ready": 0, "starting": 0, "draining": 0}
        self._rules, self._prefix = rules, prefix
        self._pending: dict[str, float] = {}  # members that were started or load their model, and since when
        self._given_up: set[str] = set()  # members that were not ready in time
        self._ready: frozenset[str] | None = None
        self._draining: set[str] = set()
        self._asked: set[str] = set()  # to drain; a member may have left before it was seen to
        self._unstopped: dict[str, float] = {}  # members that nobody could stop, and when to try again
        self._short_since = self._spare_since = math.nan
        self._changed_at = self._retry_at = -math.inf
        self._failures = 0

    def named(self, name: str) -> bool:
        """Whether a start made this name."""
        return name.startswith(self._prefix) and name[len(self._prefix) :].isdecimal()

    @property
    def started(self) -> set[str]:
        """Members that a start named: here, on their way, or nobody could stop them yet."""
        here = (self._ready or frozenset()) | self._draining | self._given_up
        return {name for name in here | self._pending.keys() | self._unstopped.keys() if self.named(name)}

    def step(
        self,
        now: float,
        members: Sequence[Present],
        need: tuple[int, int],
        leavers: Sequence[str],
        taken: set[str],
        acts: bool,
    ) -> list[Effect]:
        """`need`: members for the load, and for a little more. `leavers`: ready members, those that should leave first
        in front. `taken`: names that members of other roles have too. Without `acts` it only looks."""
        ready = {member.name for member in members if member.counts}
        effects = self._watch(now, members, ready, acts)
        coming = self._pending.keys()
        needed, spare = map(self.bounds.clamp, need)
        self.counts = {
            "needed": needed,
            "ready": len(ready),
            "starting": len(coming),
            "draining": len(self._draining),
        }
        short = min(needed, self.bounds.most - len(self._draining)) - len(ready) - len(coming)
        self._short_since = _since(self._short_since, now, short > 0)
        self._spare_since = _since(self._spare_since, now, spare < len(ready) and not coming and not self._draining)
        if not acts:
            return []
        if now - self._short_since >= self._rules.out_s and now >= self._retry_at:
            self._short_since = math.nan
            here = {member.name for member in members}
            for name in self._free_names(short, taken | here | coming | self._unstopped.keys()):
                self._pending[name] = now
                effects.append(Start(self.bounds.role, name))
            self.counts["starting"] = len(coming)
            return effects
        in_s = self._rules.in_s
        rested = now - self._spare_since >= in_s and now - self._changed_at >= in_s
        own = [name for name in leavers if self.named(name)][: min(len(ready) - spare, len(ready) - 1)]
        if rested and own:
            self._spare_since, self._changed_at = math.nan, now
            self._asked.update(own)
            effects += [Drain(self.bounds.role, name) for name in own]
        return effects

    def failed(self, now: float, effect: Start | Stop) -> None:
        """The member could not be started or stopped: try again later."""
        if isinstance(effect, Stop):
            self._unstopped[effect.node] = now + self._rules.out_s
            return
        self._pending.pop(effect.node, None)
        self._pause(now)

    def _pause(self, now: float) -> None:
        if now >= self._retry_at:  # otherwise another one of the same round has failed before
            self._failures += 1
        self._retry_at = now + min(LONGEST_PAUSE_S, self._rules.out_s * 2.0 ** min(self._failures, 20))

    def _watch(self, now: float, members: Sequence[Present], ready: set[str], acts: bool) -> list[Effect]:
        """Note which members have come and gone since the last step."""
        names = frozenset(ready)
        if names != self._ready:
            self._ready, self._changed_at = names, now
        here = {member.name for member in members}
        loading = {member.name for member in members if not member.ready and not member.draining}
        self._given_up &= loading
        for name in loading - self._given_up:
            self._pending.setdefault(name, now)
        gone = (self._draining | self._asked) - here
        late = set[str]()
        for name, again_at in list(self._unstopped.items()):
            if name in here - self._given_up:  # it is ready after all, or somebody else has started it
                del self._unstopped[name]
            elif now >= again_at:
                del self._unstopped[name]
                (late if name in here else gone).add(name)
        self._asked &= here
        for name, since in list(self._pending.items()):
            if name in names:
                self._failures = 0
                del self._pending[name]
            elif now - since > self._rules.start_s:
                del self._pending[name]
                self._given_up.add(name)
                if self.named(name):  # others load for as long as they like
                    self._pause(now)
                late.add(name)
        self._draining = {member.name for member in members if member.draining}
        stops = [Stop(self.bounds.role, name, name in late) for name in sorted(gone | late) if self.named(name)]
        return list(stops) if acts else []

    def _free_names(self, count: int, taken: set[str]) -> list[str]:
        numbers = (f"{self._prefix}{i}" for i in range(len(taken) + count))
        return [name for name in numbers if name not in taken][:count]


def _since(since: float, now: float, holds: bool) -> float:
    """Since when a condition holds; NaN if it does not."""
    if not holds:
        return math.nan
    return now if math.isnan(since) else since
