"""Steps take longer or shorter by chance: a factor with mean 1, drawn by the seed.

A step with prompts has its own; decode steps share one until the batch changes.
"""

from __future__ import annotations

import math
from random import Random


class Noise:
    """The factors of one node."""

    def __init__(self, seed: int, name: str, deviation: float) -> None:
        """deviation: of the factor's logarithm; 0 = no noise."""
        self._chance, self._deviation = Random(f"{seed} {name}"), deviation

    def factor(self) -> float:
        """Of the next step."""
        deviation = self._deviation
        return math.exp(self._chance.gauss(-deviation * deviation / 2, deviation)) if deviation else 1.0
