"""Registered: the memory that a program has registered. Pure."""

from __future__ import annotations

from bisect import bisect_right

from connect.store import codes


class Registered:
    """Ranges of addresses that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def add(self, start: int, nbytes: int) -> int:
        """INVALID for an empty range, and for one that overlaps another."""
        at = bisect_right(self._starts, start + nbytes - 1)
        if not start or not nbytes or (at and self._ends[self._starts[at - 1]] > start):
            return codes.INVALID
        self._starts.insert(at, start)
        self._ends[start] = start + nbytes
        return codes.OK

    def remove(self, start: int) -> int:
        """INVALID if no range begins there."""
        if self._ends.pop(start, None) is None:
            return codes.INVALID
        self._starts.remove(start)
        return codes.OK

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()
