"""Who is turned away, and when to come back: the queue bound of a node and the wait behind Retry-After."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request is refused rather than queued. None = no such limit."""

    max_waiting: int = 256  # queued requests per node
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    def full(self, waiting: int) -> bool:
        """A node with so many queued requests takes no more."""
        return waiting >= self.max_waiting

    def missed(self, ttft_s: float, step_s: float) -> str | None:
        """Which objective these estimates miss, None if they keep both."""
        if self.ttft_slo_s is not None and ttft_s > self.ttft_slo_s:
            return f"estimated time to first token {ttft_s:.2f} s, the objective is {self.ttft_slo_s:.2f} s"
        if self.tpot_slo_s is not None and step_s > self.tpot_slo_s:
            return f"estimated time per token {step_s:.3f} s, the objective is {self.tpot_slo_s:.3f} s"
        return None


def retry_after_s(queues: Iterable[tuple[int, float]]) -> float:
    """Whole seconds until the first of the queues (waiting requests, seconds of work) has room for one request.

    A queue moves on by one request every work / waiting seconds. At least MIN_RETRY_S, so that estimates near zero do
    not invite a stampede, at most MAX_RETRY_S.
    """
    soonest = min((work_s / max(1, waiting) for waiting, work_s in queues), default=MIN_RETRY_S)
    return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(soonest))))
