"""Steps take longer or shorter by chance: a factor with mean 1 for each step of a node, drawn by the seed."""

from __future__ import annotations

import math
from random import Random


class Noise:
    """The factors of one node."""

    def __init__(self, seed: int, node: str, deviation: float) -> None:
        """deviation: of the factor's logarithm; 0 = no noise."""
        self._chance, self._deviation = Random(f"{seed} {node}"), deviation

    def factor(self) -> float:
        """Of the next step."""
        deviation = self._deviation
        return math.exp(self._chance.gauss(-deviation * deviation / 2, deviation)) if deviation else 1.0
