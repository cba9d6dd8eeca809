"""The knowledge of a simulated cluster about the length of an answer before its end.

limit    production's bound of max_tokens in estimates (sched/placement/demand.py): traces have no max_tokens
mean     the mean of the answers that have ended
oracle   the true length: nothing in production knows it
"""

from __future__ import annotations

from lab.simulator.job import Job
from sched.placement.demand import MAX_OUTPUT_TOKENS
from sched.rejection import OutputLengths

KINDS = ("limit", "mean", "oracle")


class Lengths:
    """`ended`: the moving mean over ended requests."""

    def __init__(self, kind: str) -> None:
        """Raises ValueError for a kind that is not among KINDS."""
        if kind not in KINDS:
            raise ValueError(f"--output-lengths must be one of {', '.join(KINDS)}, got {kind!r}")
        self.known = kind == "oracle"
        self.ended = OutputLengths()
        self._kind = kind

    def expected(self, job: Job) -> int:
        """Tokens that the job's present attempt is expected to answer, at least 1."""
        if self.known:
            return job.output_tokens
        whole = MAX_OUTPUT_TOKENS if self._kind == "limit" else round(self.ended.mean)
        return max(1, whole - job.resumed)
