"""A clock that only goes forward, whatever the one it is read from does. Pure."""

from __future__ import annotations


class SteadyClock:
    """Steps back of the clock it is fed with are taken out; steps forward pass, as a pause of this node would."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._ahead = 0.0  # what was taken out

    def at(self, now: float) -> float:
        """Steady time when the other clock says `now`."""
        if now < self._last:
            self._ahead += self._last - now
        self._last = now
        return now + self._ahead

    def theirs(self, steady: float) -> float:
        """What the other clock will say at a steady time."""
        return steady - self._ahead
