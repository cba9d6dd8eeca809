"""Pace: the measured speed of each home, and how long to wait for a late one. Pure.

A get reads the replica that should finish first: its usual wait, plus the bytes in flight at its usual rate. If a home
takes much longer than expected, the call gives it up for another replica (hedged requests: Dean and Barroso, "The Tail
at Scale", 2013; here one after another, because two homes must not write to the same memory). Such a home is ranked
last for a while. At most a tenth of the eligible gets may be given up, so that a slow pool is not asked for everything
twice.
"""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.2  # of the moving averages
START_BYTES_PER_S = 2e9  # initial rate of a home
OWN_BYTES_PER_S = 8e9  # initial rate of this node's own share, so that it is preferred
GIVE_UP_RATIO = 4.0  # a home is given up after this many times its expected time
GIVE_UP_MIN_S = 0.05  # and not before this, because an event loop may be blocked for a while
SLOW_S = 1.0  # time for which a home that was given up is ranked last
BUDGET = 0.1  # gets given up per eligible get
BUDGET_MAX = 10.0  # maximum saved budget, gets


@dataclass(slots=True)
class Pace:
    """The measured pace of one home."""

    bytes_per_s: float
    wait_s: float = 0.0  # until the first byte
    spread_s: float = 0.0  # mean distance of a wait from the mean
    underway: int = 0  # bytes in flight
    slow_until: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Expected seconds until `nbytes` more have arrived."""
        return self.wait_s + (self.underway + nbytes) / self.bytes_per_s


class Paces:
    """The paces of all homes, as node `me` measures them."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._paces: dict[str, Pace] = {}
        self._budget = BUDGET_MAX

    def keep(self, homes: set[str]) -> None:
        """Forget all others."""
        self._paces = {name: pace for name, pace in self._paces.items() if name in homes}

    def started(self, home: str, nbytes: int) -> None:
        """A get of `nbytes` from a home has started; `ended` or `failed` must follow."""
        self._of(home).underway += nbytes

    def ended(self, home: str, nbytes: int, wait_s: float, move_s: float) -> None:
        """The get succeeded: `wait_s` until the home answered, `move_s` to move the bytes."""
        pace = self._less(home, nbytes)
        pace.spread_s += GAIN * (abs(wait_s - pace.wait_s) - pace.spread_s)
        pace.wait_s += GAIN * (wait_s - pace.wait_s)
        if move_s > 0:
            pace.bytes_per_s += GAIN * (nbytes / move_s - pace.bytes_per_s)

    def failed(self, home: str, nbytes: int) -> None:
        """The get failed."""
        self._less(home, nbytes)

    def given_up(self, now: float, home: str, waited_s: float) -> None:
        """The home was too slow and was given up after `waited_s`. Call `failed` too."""
        pace = self._of(home)
        pace.slow_until = now + SLOW_S
        pace.spread_s = max(pace.spread_s, waited_s)
        self._budget -= 1.0

    def seconds(self, home: str, nbytes: int) -> float:
        """Expected seconds until `nbytes` from `home` have arrived."""
        return self._of(home).seconds(nbytes)

    def is_slow(self, now: float, home: str) -> bool:
        """Whether the home was given up less than SLOW_S ago."""
        return now < self._of(home).slow_until

    def patience(self, home: str) -> float | None:
        """Seconds to wait for a running get if another replica could be asked instead; None: wait until its
        deadline."""
        self._budget = min(BUDGET_MAX, self._budget + BUDGET)
        if self._budget < 1.0:
            return None
        pace = self._of(home)
        return max(GIVE_UP_MIN_S, GIVE_UP_RATIO * (pace.seconds(0) + pace.spread_s))

    def _less(self, home: str, nbytes: int) -> Pace:
        pace = self._of(home)
        pace.underway = max(0, pace.underway - nbytes)
        return pace

    def _of(self, home: str) -> Pace:
        pace = self._paces.get(home)
        if pace is None:
            pace = self._paces[home] = Pace(OWN_BYTES_PER_S if home == self._me else START_BYTES_PER_S)
        return pace
