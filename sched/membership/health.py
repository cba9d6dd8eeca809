"""Local health (Lifeguard, Dadgar, Phillips and Currey, 2018): a slow node suspects others less.

During a garbage collection or a callback that blocks the interpreter, all other nodes seem to be dead. The score counts
signs of this: a failed probe whose helpers did not send nacks either, or a suspicion of this node that it had to
refute. Answered probes lower the score. Probe period and timeout are multiplied by score + 1.
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
