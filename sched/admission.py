"""Decides when a node refuses requests and computes Retry-After: queue limits and objectives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits above which a request is refused instead of queued. None = no limit."""

    max_waiting: int = 256  # queued requests per node
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None

    def full(self, waiting: int) -> bool:
        """Whether a node with `waiting` queued requests refuses more."""
        return waiting >= self.max_waiting

    def missed(self, ttft_s: float, step_s: float) -> str | None:
        """The objective that these estimates (seconds) miss, as text; None if they meet both."""
        if self.ttft_slo_s is not None and ttft_s > self.ttft_slo_s:
            return f"estimated time to first token {ttft_s:.2f} s, the objective is {self.ttft_slo_s:.2f} s"
        if self.tpot_slo_s is not None and step_s > self.tpot_slo_s:
            return f"estimated time per token {step_s:.3f} s, the objective is {self.tpot_slo_s:.3f} s"
        return None


def retry_after_s(queues: Iterable[tuple[int, float]]) -> float:
    """Whole seconds until the first of the queues (waiting requests, seconds of work) has room for one request.

    A queue advances by one request every work / waiting seconds. The result is at least MIN_RETRY_S, so that estimates
    near zero do not cause a stampede, and at most MAX_RETRY_S.
    """
    soonest = min((work_s / max(1, waiting) for waiting, work_s in queues), default=MIN_RETRY_S)
    return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(soonest))))
