"""How many lines of batches run at once. Pure.

Batches fill idle capacity. A line starts while fewer than `limit` run, and while fewer than WAITING of them wait for
their first token: when the cluster has no room, first tokens come late, and no further line starts. Each class of
requests comes before `batch` in every queue, so those few lines are all that others may have to wait behind. While this
node works on requests of other clients, no line starts before all running ones have ended but ALONGSIDE. A refusal
(429 or 503) stops all starts for a while, and halves the limit, which grows again by one per line that ends well.
"""

from __future__ import annotations

WAITING, ALONGSIDE = 4, 1
LEAST_PAUSE_S, MOST_PAUSE_S = 0.2, 10.0


class Pace:
    """`limit`: lines at once, at most."""

    def __init__(self, limit: int) -> None:
        self._most = self._limit = limit
        self.running = 0
        self.waiting = 0  # of them for their first token
        self._paused_until = 0.0

    @property
    def limit(self) -> int:
        """Lines at once, now."""
        return self._limit

    def pause_s(self, now: float, others: int = 0) -> float | None:
        """0 if a line may start; the seconds to wait after a refusal; None until another line makes progress, or until
        fewer of the `others` are there: requests of other clients."""
        if now < self._paused_until:
            return self._paused_until - now
        limit = min(self._limit, ALONGSIDE) if others else self._limit
        return 0.0 if self.running < limit and self.waiting < WAITING else None

    def started(self) -> None:
        self.running += 1
        self.waiting += 1

    def first_token(self) -> None:
        self.waiting -= 1

    def ended(self, had_token: bool) -> None:
        """A line ended, or it stops for now."""
        self.running -= 1
        self.waiting -= not had_token

    def went_well(self) -> None:
        self._limit = min(self._most, self._limit + 1)

    def refused(self, now: float, retry_after_s: float) -> None:
        if now >= self._paused_until:  # a burst of refusals counts once
            self._limit = max(1, self._limit // 2)
        self._paused_until = max(self._paused_until, now + min(max(retry_after_s, LEAST_PAUSE_S), MOST_PAUSE_S))
