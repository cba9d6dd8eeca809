"""Pace: how fast each home answers, as this node has seen it, and when to stop waiting for one that has not. Pure.

Of several replicas the one is read that should be done first: its usual wait, then what is under way to it at its usual
rate. A home that takes far longer than it should is given up for another replica within the call (Dean and Barroso,
"The Tail at Scale", 2013, hedged requests; here one after the other, because two homes must not write to one place).
Such a home comes last for a while. Gets may be given up for a tenth of all that could be, so that a pool that is slow
as a whole is not asked for everything twice.
"""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.2  # of the moving averages
START_BYTES_PER_S = 2e9  # of a home not yet heard from
OWN_BYTES_PER_S = 8e9  # of this node's share: prefer it at first
PATIENCE = 4.0  # times as long as it should take
PATIENCE_MIN_S = 0.05  # nobody is given up sooner: an event loop may be away for a while
SLOW_S = 1.0  # so long a home that was given up comes last
BUDGET = 0.1  # gets that are given up, per get that may be
BUDGET_MAX = 10.0  # saved for bad times


@dataclass(slots=True)
class Pace:
    """Of one home."""

    bytes_per_s: float
    wait_s: float = 0.0  # until the first byte
    spread_s: float = 0.0  # mean distance of a wait from the mean
    underway: int = 0  # bytes asked for and not yet here
    slow_until: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Expected until `nbytes` more are here."""
        return self.wait_s + (self.underway + nbytes) / self.bytes_per_s


class Paces:
    """Of all homes, for node `me`."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._paces: dict[str, Pace] = {}
        self._budget = BUDGET_MAX

    def keep(self, homes: set[str]) -> None:
        """Forget all others."""
        self._paces = {name: pace for name, pace in self._paces.items() if name in homes}

    def started(self, home: str, nbytes: int) -> None:
        """So much has been asked of a home; `ended`, `failed` or `given_up` follows."""
        self._of(home).underway += nbytes

    def ended(self, home: str, nbytes: int, wait_s: float, move_s: float) -> None:
        """It came: `wait_s` until the home had answered, `move_s` for the bytes."""
        pace = self._less(home, nbytes)
        pace.spread_s += GAIN * (abs(wait_s - pace.wait_s) - pace.spread_s)
        pace.wait_s += GAIN * (wait_s - pace.wait_s)
        if move_s > 0:
            pace.bytes_per_s += GAIN * (nbytes / move_s - pace.bytes_per_s)

    def failed(self, home: str, nbytes: int) -> None:
        """It did not come."""
        self._less(home, nbytes)

    def given_up(self, now: float, home: str, waited_s: float) -> None:
        """It was too slow, after `waited_s`; `failed` is told, too."""
        pace = self._of(home)
        pace.slow_until = now + SLOW_S
        pace.spread_s = max(pace.spread_s, waited_s)
        self._budget -= 1.0

    def seconds(self, home: str, nbytes: int) -> float:
        """Until `nbytes` from `home` should be here."""
        return self._of(home).seconds(nbytes)

    def is_slow(self, now: float, home: str) -> bool:
        """It was given up a moment ago."""
        return now < self._of(home).slow_until

    def patience(self, home: str) -> float | None:
        """Seconds to wait for what is under way where another replica could be asked instead; None: until its
        deadline."""
        self._budget = min(BUDGET_MAX, self._budget + BUDGET)
        if self._budget < 1.0:
            return None
        pace = self._of(home)
        return max(PATIENCE_MIN_S, PATIENCE * (pace.seconds(0) + pace.spread_s))

    def _less(self, home: str, nbytes: int) -> Pace:
        pace = self._of(home)
        pace.underway = max(0, pace.underway - nbytes)
        return pace

    def _of(self, home: str) -> Pace:
        pace = self._paces.get(home)
        if pace is None:
            pace = self._paces[home] = Pace(OWN_BYTES_PER_S if home == self._me else START_BYTES_PER_S)
        return pace
