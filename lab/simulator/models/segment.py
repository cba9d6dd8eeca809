"""Decode steps that are not simulated one by one. Between two changes of a batch, the step time is linear in its
context.

t(k) = k (base + slope S) + slope B k (k - 1) / 2      S = context of B requests now, each step adds B tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Segment:
    """Running decode steps whose number may still be reduced."""

    begun: float
    steps: int
    base: float
    slope: float
    batch: int
    context: int

    def seconds(self, steps: int) -> float:
        b = self.slope * self.batch / 2
        return steps * (self.base + self.slope * self.context) + b * steps * (steps - 1)

    def steps_until(self, seconds: float) -> int:
        """The number of whole steps, at least one, that take at least `seconds`."""
        b = self.slope * self.batch / 2
        a = self.base + self.slope * self.context - b
        # The root of k a + k^2 b = seconds, written so that a tiny b loses no digits.
        root = 2 * seconds / (a + math.sqrt(a * a + 4 * b * max(0.0, seconds)))
        return max(1, math.ceil(root - 1e-6))
