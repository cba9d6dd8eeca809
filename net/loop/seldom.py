"""Rate limit for log lines that strangers can cause, so that they cannot fill a log. Pure."""

from __future__ import annotations

PERIOD_S = 10.0


class Seldom:
    """Allows one line per period, with the number of omitted lines."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._next_at = float("-inf")
        self._left_out = 0

    def now(self, now: float) -> int | None:
        """None: omit this line. Otherwise the number of lines omitted since the last one."""
        if now < self._next_at:
            self._left_out += 1
            return None
        self._next_at = now + self._period_s
        left_out, self._left_out = self._left_out, 0
        return left_out
