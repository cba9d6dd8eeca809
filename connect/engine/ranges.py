"""Ranges: the memory that one side has registered, by address. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

Range = tuple[int, int, str]
"""(address, bytes, name of the region)"""


class Ranges:
    """Ranges that do not overlap."""

    def __init__(self, rows: Sequence[Range] = ()) -> None:
        self._rows = sorted(rows)

    def rows(self) -> list[Range]:
        """All of them, by address."""
        return list(self._rows)

    def add(self, address: int, nbytes: int, name: str) -> bool:
        """False for a range that overlaps another."""
        at = bisect_right(self._rows, (address + nbytes - 1, 1 << 64, ""))
        if at and self._rows[at - 1][0] + self._rows[at - 1][1] > address:
            return False
        insort(self._rows, (address, nbytes, name))
        return True

    def remove(self, address: int) -> str | None:
        """The name of the range that begins there; None if there is none."""
        for row in self._rows:
            if row[0] == address:
                self._rows.remove(row)
                return row[2]
        return None

    def find(self, address: int, nbytes: int) -> tuple[str, int] | None:
        """(name, offset in it) of the range that holds all these bytes."""
        at = bisect_right(self._rows, (address, 1 << 64, "")) - 1
        if at < 0:
            return None
        start, length, name = self._rows[at]
        return (name, address - start) if address + nbytes <= start + length else None
