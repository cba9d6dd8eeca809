"""Whether a measured quantity stays flat: its robust growth over the second half of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Point = tuple[float, float]
"""(time in seconds, value)"""

LEAST = 8
"""Samples that a second half must have for a judgement."""

EDGE = 0.2
"""Share of the samples at each end of the second half whose medians are its levels there."""


def slope(points: Sequence[Point]) -> float:
    """Theil-Sen estimate: the median of the slopes of all pairs, per second. Up to 29 % of the samples may be anything
    without an effect on it. Raises ValueError without two different times."""
    found = [
        (after - before) / (later - earlier)
        for number, (earlier, before) in enumerate(points)
        for later, after in points[number + 1 :]
        if later > earlier
    ]
    if not found:
        raise ValueError("a slope needs samples of two different times")
    return median(found)


def growth(points: Sequence[Point], begun: float, ended: float) -> float | None:
    """Growth over the second half of the time from `begun` to `ended`: what its slope makes of that half, or the
    difference of the levels at its two ends, whichever is more. The slope sees a slow leak in noise, the levels see
    one large step. None with fewer than LEAST samples there, so a process that began late is not judged."""
    middle = (begun + ended) / 2
    later = [point for point in points if point[0] >= middle]
    if len(later) < LEAST or points[0][0] > middle:
        return None
    at_end = max(2, round(EDGE * len(later)))
    values = [value for _, value in later]
    step = median(values[-at_end:]) - median(values[:at_end])
    return max(slope(later) * (later[-1][0] - later[0][0]), step)
