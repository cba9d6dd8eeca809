"""Learns the gaps between the turns of sessions, and predicts the next one. Pure.

    ln(gap) is normal: its mean is that of the session, drawn towards that of all sessions; its spread is that of the
    errors which such predictions made so far, for sessions with 0, 1, 2, ... known gaps apart
    return  the share of the turns with this number which another turn followed

A session that has not returned by the time at which LEAST_RETURN of such sessions still would counts as ended; if it
returns later, the count is mended. A recent gap counts more than an old one: the last MEMORY of them are remembered.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from statistics import NormalDist

FIRST_GAP_S, FIRST_SPREAD = 30.0, 1.5
"""A gap before any was seen: its median, and the standard deviation of its logarithm; they weigh FIRST_WEIGHT gaps."""

FIRST_WEIGHT = 4.0
MEMORY = 1000.0
SPREAD_LEAST = 0.05
PULL = 1.0
"""The mean of all sessions weighs as much as this number of gaps of the session."""

BUCKETS = 4
"""Known gaps, and turns, from this number on are counted together."""

LEAST_RETURN = 0.02
SESSIONS_MAX = 1 << 16
ENDS_LEAST = 64
"""The heap of possible ends is not looked through for fewer than these beyond two for each session."""

LEAST_GAP_S = 1e-3

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Return:
    """The next turn of a session: `returns` is the probability that there is one, and exp(`log_mean`) the median of the
    gap before it, seconds."""

    log_mean: float
    log_spread: float
    returns: float

    def by(self, seconds: float) -> float:
        """The probability that the session has returned by then."""
        return self.returns * self._share(seconds)

    def still(self, seconds: float) -> float:
        """The probability that the session returns later, if it has not by then."""
        left = self.returns * (1 - self._share(seconds))
        return left / (left + 1 - self.returns) if left > 0 else 0.0

    def quantile(self, share: float) -> float:
        """Seconds by which this share, between 0 and 1, of the sessions that return have done so."""
        return math.exp(min(700.0, self.log_mean + self.log_spread * NORMAL.inv_cdf(share)))

    def over_s(self, least: float) -> float:
        """Seconds after which `still` is at most `least`; infinite if that is never so."""
        if self.returns <= least:
            return 0.0
        share = (self.returns - least) / (self.returns * (1 - least))
        return self.quantile(share) if share < 1 else math.inf

    def _share(self, seconds: float) -> float:
        return NORMAL.cdf((math.log(seconds) - self.log_mean) / self.log_spread) if seconds > 0 else 0.0


@dataclass(slots=True)
class Fading:
    """The weighted sum of values, of which old ones count less."""

    weight: float
    total: float

    def add(self, value: float, weight: float = 1.0) -> None:
        fade = 1 - 1 / MEMORY
        self.weight, self.total = self.weight * fade + weight, self.total * fade + weight * value

    @property
    def mean(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class _Session:
    """`away_since`: end of the last turn; NaN during one. `predicted`: the mean of ln(gap) then. `number`: of its entry
    among those that may end."""

    turns: int = 0
    gaps: int = 0
    log_total: float = 0.0
    away_since: float = math.nan
    predicted: float = 0.0
    ended: bool = False
    number: int = -1


class Gaps:
    """The sessions of one acceptor. Memory is bounded by `sessions_max` sessions; the one without a turn for longest is
    forgotten first. `now` may not go back."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self.sessions_max = sessions_max
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._means = Fading(FIRST_WEIGHT, FIRST_WEIGHT * math.log(FIRST_GAP_S))
        # squared, of ln(gap), by the number of known gaps
        self._errors = [Fading(FIRST_WEIGHT, FIRST_WEIGHT * FIRST_SPREAD**2) for _ in range(BUCKETS)]
        self._returns = [Fading(2.0, 1.0) for _ in range(BUCKETS)]  # by the number of turns so far
        self._ends: list[tuple[float, int, Hashable]] = []  # a heap
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sessions)

    def arrived(self, now: float, session: Hashable) -> None:
        """A turn begins."""
        self._settle(now)
        one = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if not math.isnan(one.away_since):
            self._returned(one, now - one.away_since)
            one.away_since = math.nan
        while len(self._sessions) > self.sessions_max:
            self._sessions.popitem(last=False)

    def left(self, now: float, session: Hashable) -> Return:
        """A turn is over. Raises KeyError for a session without one, or which is forgotten."""
        self._settle(now)
        one = self._sessions[session]
        one.turns += 1
        one.away_since, one.ended, one.number = now, False, next(self._numbers)
        found = self._predict(one)
        one.predicted = found.log_mean
        if (over_s := found.over_s(LEAST_RETURN)) < math.inf:
            heappush(self._ends, (now + over_s, one.number, session))
            self._compact()
        return found

    def _compact(self) -> None:
        """Drop the ends of sessions that returned or are forgotten, once they are the majority."""
        if len(self._ends) > ENDS_LEAST + 2 * len(self._sessions):
            known = self._sessions
            self._ends = [end for end in self._ends if end[2] in known and known[end[2]].number == end[1]]
            heapify(self._ends)

    def _predict(self, one: _Session) -> Return:
        mean = (PULL * self._means.mean + one.log_total) / (PULL + one.gaps)
        spread = math.sqrt(self._errors[_bucket(one.gaps)].mean)
        return Return(mean, max(SPREAD_LEAST, spread), self._returns[_bucket(one.turns - 1)].mean)

    def _returned(self, one: _Session, gap_s: float) -> None:
        log_gap = math.log(max(LEAST_GAP_S, gap_s))
        self._errors[_bucket(one.gaps)].add((log_gap - one.predicted) ** 2)
        self._means.add(log_gap)
        returns = self._returns[_bucket(one.turns - 1)]
        if one.ended:  # it had been counted with 0
            returns.total = min(returns.weight, returns.total + 1)
        else:
            returns.add(1.0)
        one.gaps += 1
        one.log_total += log_gap

    def _settle(self, now: float) -> None:
        """Count the sessions that will not return as ended."""
        while self._ends and self._ends[0][0] <= now:
            _, number, session = heappop(self._ends)
            one = self._sessions.get(session)
            if one is None or one.number != number or math.isnan(one.away_since):
                continue
            one.ended = True
            self._returns[_bucket(one.turns - 1)].add(0.0)


def _bucket(number: int) -> int:
    return min(number, BUCKETS - 1)
