"""When an idle node measures its steps again, and whether its cost models are wrong. Pure.

A node measures its speed when it starts, and then learns from its requests. If another process disturbed the start, or
the last requests, a node without requests would keep the wrong models, get no requests because of them, and learn
nothing. So it measures a few small steps while it is idle. The pause doubles while the models are right, and is short
again after a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import exp, log

SETTLE_S = 1.0
"""A node is idle when it has had no request for so long. Between two requests of a burst is no time for it."""

FIRST_S, LONGEST_S = 5.0, 600.0
"""Pause before the first check, and the longest one."""

SHARE = 0.01
"""Of its time, that a node spends on checks at most."""

WRONG = 1.5
"""Models that are wrong by this factor, in the mean over some shapes, change decisions. Single shapes may be further
off: the forms are simple."""


class Verdict(Enum):
    """What a check has found."""

    RIGHT = "right"
    WRONG = "wrong"  # and the models were corrected
    CUT = "cut"  # nothing: a request came


class IdleChecks:
    """The schedule of one node. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._busy_at = self._ended = now
        self._pause_s, self._owed_s = FIRST_S, 0.0

    def busy(self, now: float) -> None:
        """The node has a request."""
        self._busy_at = max(self._busy_at, now)

    def wait_s(self, now: float) -> float:
        """Seconds until the next check may begin, if no request comes before; 0: now."""
        return max(0.0, self._ended + max(self._pause_s, self._owed_s) - now, self._busy_at + SETTLE_S - now)

    def ended(self, begin: float, now: float, verdict: Verdict) -> None:
        """A check has ended."""
        self._ended, self._owed_s = now, (now - begin) * (1 / SHARE - 1)
        if verdict is Verdict.WRONG:
            self._pause_s = FIRST_S
        elif verdict is Verdict.RIGHT:
            self._pause_s = min(LONGEST_S, 2 * self._pause_s)


def factor(pairs: Sequence[tuple[float, float]]) -> float:
    """By how much the steps take longer than estimated, in the geometric mean; pairs: (estimated, measured) seconds, at
    least one."""
    return exp(sum(log(measured / max(estimated, 1e-9)) for estimated, measured in pairs) / len(pairs))


def wrong(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether the estimates should be replaced; not if nothing was measured."""
    return bool(pairs) and not 1 / WRONG < factor(pairs) < WRONG
