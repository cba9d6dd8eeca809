"""Rails: several paths to one peer, their health and their speed. Pure.

A slice is sent on the rail that would finish it first by its estimated bandwidth, so slow rails get few slices and fast
ones many. Rails far from the memory (net/transfer/common/topology.py) are used only while no near one is up. A failed
rail is not used for a pause, which doubles with every failure up to BACKOFF_MAX_S and is reset when the rail works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BACKOFF_S = 0.5
BACKOFF_MAX_S = 30.0
FIRST_GUESS = 1e9  # bytes/s of a rail before any rail has been measured
INFINITE = float("inf")
WEIGHT = 0.2  # of a new measurement in the estimate
SAMPLE_BYTES = 1 << 20  # at least this many bytes per measurement: latency is not bandwidth


@dataclass(slots=True)
class Rail:
    """One rail as the sender sees it. Times are in seconds of the caller's clock."""

    name: str
    up: bool = False
    retry_at: float = 0.0  # when a rail that is down may be tried again
    backoff_s: float = BACKOFF_S
    bytes_per_s: float = FIRST_GUESS
    measured: bool = False  # bytes_per_s is more than a guess
    in_flight: int = 0  # bytes
    moved: int = 0  # bytes that arrived
    failures: int = 0
    resent: int = 0  # slices that had to be sent again
    _sample_from: float = 0.0
    _sample_bytes: int = 0

    def opened(self) -> None:
        """The rail is usable (again)."""
        self.up = True
        self.in_flight = self._sample_bytes = 0

    def failed(self, now: float) -> None:
        """Do not use the rail until `opened`; the caller may try to open it at `retry_at`."""
        if self.up:
            self.failures += 1
            self.retry_at = now + self.backoff_s
            self.backoff_s = min(BACKOFF_MAX_S, 2 * self.backoff_s)
        self.up = False
        self.in_flight = 0

    def postpone(self, now: float) -> None:
        """The rail could not be opened again."""
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(BACKOFF_MAX_S, 2 * self.backoff_s)

    def sent(self, now: float, nbytes: int) -> None:
        if self.in_flight == 0:
            self._sample_from, self._sample_bytes = now, 0
        self.in_flight += nbytes

    def arrived(self, now: float, nbytes: int) -> None:
        self.in_flight -= nbytes
        self.moved += nbytes
        self.backoff_s = BACKOFF_S
        self._sample_bytes += nbytes
        elapsed = now - self._sample_from
        if self._sample_bytes >= SAMPLE_BYTES and elapsed > 0:
            weight = WEIGHT if self.measured else 1.0
            self.bytes_per_s += weight * (self._sample_bytes / elapsed - self.bytes_per_s)
            self.measured = True
            self._sample_from, self._sample_bytes = now, 0

    def row(self) -> dict[str, Any]:
        """For /debug/state and the metrics; gb_per_s is 0 before the first measurement."""
        return {
            "rail": self.name,
            "up": self.up,
            "gb_per_s": self.bytes_per_s / 1e9 if self.measured else 0.0,
            "bytes": self.moved,
            "in_flight": self.in_flight,
            "failures": self.failures,
            "resent": self.resent,
        }


def choose(
    rails: Sequence[Rail],
    nbytes: int,
    room: Sequence[int] = (),
    distances: Sequence[int] = (),
    window: int | None = None,
) -> int | None:
    """The index of the rail that would finish `nbytes` more bytes first, among the nearest rails that are up; None if
    none of them has room. room: of each rail; empty: every rail has room. distances: of each rail; empty: all equal.
    window: a rail with at least this many bytes in flight takes no more."""
    nearest = min((distances[i] for i, rail in enumerate(rails) if rail.up), default=0) if distances else 0
    guess = 0.0
    best, best_s = None, INFINITE
    for i, rail in enumerate(rails):
        if not rail.up or (room and room[i] <= 0) or (distances and distances[i] > nearest):
            continue
        if window is None or rail.in_flight < window:
            rate = rail.bytes_per_s if rail.measured else (guess := guess or typical(rails))
            seconds = (rail.in_flight + nbytes) / rate
            if seconds < best_s:
                best, best_s = i, seconds
    return best


def typical(rails: Sequence[Rail]) -> float:
    """Assumed bytes/s of a rail that is not measured yet: the mean of the others."""
    known = [rail.bytes_per_s for rail in rails if rail.measured]
    return sum(known) / len(known) if known else FIRST_GUESS


def cut(offset: int, length: int, piece: int) -> list[tuple[int, int]]:
    """(offset, length) of the slices of one span: `piece` bytes each; a short rest is joined to the last slice."""
    count = max(1, (length + piece - 1 - piece // 4) // piece)
    starts = [offset + i * piece for i in range(count)]
    ends = [*starts[1:], offset + length]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]
