"""A clock that never goes back, made from one that may. Pure."""

from __future__ import annotations


class SteadyClock:
    """Removes backward steps of the source clock. Forward steps remain and look like a pause of this node."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._ahead = 0.0  # sum of the removed steps, seconds

    def at(self, now: float) -> float:
        """The steady time at time `now` of the source clock."""
        if now < self._last:
            self._ahead += self._last - now
        self._last = now
        return now + self._ahead

    def theirs(self, steady: float) -> float:
        """The source clock's time at a steady time."""
        return steady - self._ahead
