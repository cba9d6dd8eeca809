"""The way of a session's KV between two turns: it stays, moves down, comes back, is dropped. Pure.

    stays   it returns so soon that moving it down is not worth it, or no time is as probable as the next one; moved
            down once it is late
    parked  moved down at once, and up just before the time in which it most probably returns; down again after it
    away    moved down; no time is probable enough, so its next request brings it up
    over    it hardly returns: moved down at once, and dropped soon

Moved down: evicted from DRAM before all other blocks, the later its return the sooner; the SSD still has it. Dropped:
when the tier is nearly full, after the time to live, at which hardly any such session would still return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sched.sessions.gaps import LEAST_RETURN, Return

STAYS, PARKED, AWAY, OVER = "stays", "parked", "away", "over"
CLASSES = (STAYS, PARKED, AWAY, OVER)

LEAST_TTL_S = 60.0
HALVINGS = 3

TRIES = 20
"""Times for the begin of the window that are compared, from the first to the last twentieth of the returns."""


@dataclass(frozen=True, slots=True)
class Parking:
    """`name`: of the class. Seconds since the end of the turn; infinite = never. The blocks move down at `down_s`, up
    at `up_s` and down again at `late_s`, and are dropped at `over_s`. down_s <= up_s <= late_s, and none is above
    over_s, unless it is infinite."""

    name: str
    down_s: float
    up_s: float
    late_s: float
    over_s: float


@dataclass(frozen=True, slots=True)
class ParkingRules:
    """`hold_s`: a session that half of the time returns sooner stays. `window_s`: the longest time for which KV that
    came up waits in DRAM. `least_hit`: the least probability of a return in that time for which it comes up. `ttl_s`:
    the longest, and `least_ttl_s` the shortest time to live."""

    hold_s: float = 15.0
    window_s: float = 30.0
    least_hit: float = 0.6
    least_ttl_s: float = LEAST_TTL_S
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 <= self.hold_s < math.inf or not 0 < self.window_s < math.inf or not 0 < self.least_hit <= 1:
            raise ValueError("sessions are held for a time from 0 on, and come up for a window above 0")
        if not 0 < self.least_ttl_s <= self.ttl_s < math.inf:
            raise ValueError(f"the time to live must be above 0 and finite, not {self.least_ttl_s} to {self.ttl_s} s")


def choose(next_turn: Return, rules: ParkingRules) -> Parking:
    """The way of the KV of a session whose turn is over."""
    over_s = min(rules.ttl_s, max(rules.least_ttl_s, next_turn.over_s(LEAST_RETURN)))
    if next_turn.returns <= LEAST_RETURN:
        return Parking(OVER, 0.0, math.inf, math.inf, over_s)
    if next_turn.quantile(0.5) <= rules.hold_s:
        late_s = min(over_s, max(rules.hold_s, next_turn.quantile(0.9)))
        return Parking(STAYS, late_s, math.inf, math.inf, over_s)
    begin_s, seconds, hit = narrowest(next_turn, rules)
    if hit < rules.least_hit or begin_s + seconds > over_s:
        return Parking(AWAY, 0.0, math.inf, math.inf, over_s)
    if begin_s == 0:
        return Parking(STAYS, min(over_s, max(rules.hold_s, seconds)), math.inf, math.inf, over_s)
    return Parking(PARKED, 0.0, begin_s, begin_s + seconds, over_s)


def narrowest(next_turn: Return, rules: ParkingRules) -> tuple[float, float, float]:
    """(begin, length, probability) of the shortest window, of `window_s` and its halves, in which the session
    returns with `least_hit`; otherwise of the whole one."""
    for halvings in range(HALVINGS, -1, -1):
        seconds = rules.window_s / 2**halvings
        begin_s, hit = window(next_turn, seconds)
        if hit >= rules.least_hit:
            break
    return begin_s, seconds, hit


def window(next_turn: Return, seconds: float) -> tuple[float, float]:
    """(begin, probability) of the window of this length in which the session most probably returns; the earliest one
    among equals."""
    begins = [0.0, *(next_turn.quantile(step / TRIES) for step in range(1, TRIES))]
    hits = [next_turn.by(begin_s + seconds) - next_turn.by(begin_s) for begin_s in begins]
    best = max(hits)
    return begins[hits.index(best)], best
