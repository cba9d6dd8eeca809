"""Local health (Lifeguard, Dadgar, Phillips and Currey, 2018): a node that is slow itself blames the others less.

A garbage collection or a callback that holds the interpreter looks from inside as if everybody else were dead. The
score counts signs of that: a failed probe whose helpers did not even say "no answer", a suspicion of the node itself
that it had to refute. Good probes take points off. Probe period and timeout are multiplied by score + 1.
"""

from __future__ import annotations

HIGHEST = 7


class LocalHealth:
    """0 = healthy .. HIGHEST."""

    def __init__(self) -> None:
        self.score = 0

    @property
    def multiplier(self) -> int:
        return self.score + 1

    def good(self) -> None:
        """A probe was answered in time."""
        self.score = max(0, self.score - 1)

    def bad(self, points: int = 1) -> None:
        self.score = min(HIGHEST, self.score + points)
