"""Decides how often to restart a failed background task. Pure."""

from __future__ import annotations

from collections import deque

MAX_RESTARTS = 5
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5


class Restarts:
    """The restarts of one task: at most `most` within `window_s` seconds; each pause is twice the previous one."""

    def __init__(
        self, most: int = MAX_RESTARTS, window_s: float = WINDOW_S, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._first_pause_s = first_pause_s
        self._failures: deque[float] = deque()

    def failed(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: the task has failed too often and must not restart."""
        while self._failures and now - self._failures[0] >= self._window_s:
            self._failures.popleft()
        self._failures.append(now)
        if len(self._failures) > self._most:
            return None
        return float(self._first_pause_s * 2 ** (len(self._failures) - 1))
