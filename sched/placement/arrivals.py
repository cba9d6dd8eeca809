"""The arrival rate of requests at one acceptor."""

from __future__ import annotations

import math


class ArrivalRate:
    """An exponentially weighted rate over about the last `memory_s` seconds."""

    def __init__(self, memory_s: float = 5.0) -> None:
        self.memory_s = memory_s
        self._weight = 0.0
        self._at: float | None = None

    def count(self, now: float) -> None:
        """Count one arrival."""
        self._weight = self.per_s(now) * self.memory_s + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        if self._at is None:
            return 0.0
        return self._weight * math.exp(-max(0.0, now - self._at) / self.memory_s) / self.memory_s
