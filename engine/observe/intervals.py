"""Intervals of activities, and the time that two activities share. Pure.

They measure the overlap of transfer and computation: the part of a KV transfer that runs during the prompt's
computation is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""(begin, end), seconds of one clock."""


class Intervals:
    """A bounded record of (begin, end, amount), ordered by `begin`. When it is full, it joins neighbours: a long
    request costs resolution, not memory."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._items: list[tuple[float, float, int]] = []

    def add(self, begin: float, end: float, amount: int) -> None:
        """`amount`: bytes or tokens."""
        if len(self._items) >= self._most:
            self._items = [_join(self._items[i : i + 2]) for i in range(0, len(self._items), 2)]
        self._items.append((begin, end, amount))

    def __len__(self) -> int:
        return len(self._items)

    def before(self, now: float) -> list[list[float]]:
        """[begin, end, amount] with times in seconds before `now`. The event that contains them has the time `now`, so
        only that time needs a conversion between clocks."""
        return [[now - begin, now - end, amount] for begin, end, amount in self._items]


def _join(pair: Sequence[tuple[float, float, int]]) -> tuple[float, float, int]:
    return pair[0][0], max(item[1] for item in pair), sum(item[2] for item in pair)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds during which at least one interval ran."""
    return sum(end - begin for begin, end in union(intervals))


def shared(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Seconds during which both an interval of `some` and one of `others` ran."""
    left, right = union(some), union(others)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def efficiency(transfer: Sequence[Interval], compute: Sequence[Interval]) -> float | None:
    """Hidden time / transfer time, 0 to 1; None if nothing was transferred."""
    took = length(transfer)
    return shared(transfer, compute) / took if took else None
