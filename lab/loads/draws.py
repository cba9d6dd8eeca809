"""Draws from a distribution given by its quantiles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random


class Quantiles:
    """Linear interpolation between (share below, value) points; the first share must be 0 and the last 1."""

    def __init__(self, *points: tuple[float, float]) -> None:
        shares = [share for share, _ in points]
        if shares != sorted(shares) or (shares[0], shares[-1]) != (0.0, 1.0):
            raise ValueError(f"quantiles must rise from 0 to 1, got {shares}")
        self._shares: Sequence[float] = shares
        self._values = [value for _, value in points]

    def draw(self, rng: Random) -> int:
        share = rng.random()
        i = bisect_right(self._shares, share)
        below, above = self._shares[i - 1], self._shares[i]
        low, high = self._values[i - 1], self._values[i]
        return round(low + (high - low) * (share - below) / (above - below))
