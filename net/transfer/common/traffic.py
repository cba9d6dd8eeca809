"""Traffic between this node and one peer: sums, a latency histogram, and a rate limit for experiments. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from net.transfer.common.rails import SAMPLE_BYTES, WEIGHT

LATENCY_BUCKETS_S = (
    *(20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3),
    *(10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""Upper bounds of a submission's duration; one more bucket counts longer ones."""


@dataclass(slots=True)
class Traffic:
    """Sums over the submissions to one peer. `seconds` adds up concurrent submissions."""

    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    failures: int = 0
    bytes_per_s: float = 0.0  # moving mean over submissions of at least SAMPLE_BYTES
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))

    def done(self, read: bool, nbytes: int, seconds: float) -> None:
        """One submission has succeeded."""
        self.seconds += seconds
        self.latencies[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        if nbytes >= SAMPLE_BYTES and seconds > 0:
            weight = WEIGHT if self.bytes_per_s else 1.0
            self.bytes_per_s += weight * (nbytes / seconds - self.bytes_per_s)
        if read:
            self.bytes_read += nbytes
        else:
            self.bytes_written += nbytes

    def gb_per_s(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9 if self.seconds else 0.0

    def quantile_s(self, share: float) -> float | None:
        """Upper bound of the bucket that contains this quantile of the submissions; None before the first one, and
        above the last bound."""
        wanted = share * sum(self.latencies)
        seen = 0
        for bound, count in zip(LATENCY_BUCKETS_S, self.latencies, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return None

    def row(self) -> dict[str, Any]:
        """For /debug/state and the metrics; the quantiles are upper bounds."""
        p50, p99 = self.quantile_s(0.5), self.quantile_s(0.99)
        return {
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "seconds": self.seconds,
            "gb_per_s": self.gb_per_s(),
            "failures": self.failures,
            "latencies": list(self.latencies),
            "p50_ms": None if p50 is None else 1e3 * p50,
            "p99_ms": None if p99 is None else 1e3 * p99,
        }


class RailLimit:
    """Simulates a rail of `bytes_per_s`, so that overlap can be studied on one host.

    A submission is held back until this rail would have delivered it. Bulk is delivered in order of arrival; an urgent
    submission uses time of the rail but does not wait for earlier bulk.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a rail limit must be above 0 bytes/s, got {bytes_per_s:g}: see --rail-limit")
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def hold_s(self, now: float, nbytes: int, urgent: bool) -> float:
        """Seconds for which to hold back a submission."""
        took = nbytes / self.bytes_per_s
        self._free_at = max(self._free_at, now) + took
        return took if urgent else self._free_at - now
