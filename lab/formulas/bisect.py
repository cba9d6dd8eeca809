"""The largest load that meets a condition, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tried:
    """A load, and the figures of its verdict."""

    load: float
    good: bool
    values: dict[str, float]


def largest(try_load: Callable[[float], Tried], begin: float, tolerance: float, most: int = 40) -> list[Tried]:
    """Every tried load, in order; the best good one is within `tolerance` (relative) of a bad one. Starting at `begin`,
    the load doubles or halves until one is good and one bad. Raises ValueError when `most` tries find no such pair, or
    none that is as near as `tolerance` wants."""
    if not begin > 0 or not 0 < tolerance < 1:
        raise ValueError(f"--begin must be positive and --tolerance between 0 and 1, got {begin} and {tolerance}")
    tried = [try_load(begin)]
    low, high = (begin, 0.0) if tried[0].good else (0.0, begin)
    while not low or not high or high > low * (1 + tolerance):
        if len(tried) >= most:
            if low and high:
                raise ValueError(f"--tolerance {tolerance} is too small: {most} tries end at {low} and {high}")
            what = "the objectives are never met" if not low else "the objectives are always met"
            raise ValueError(f"{what}: tried loads from {begin} to {tried[-1].load}")
        load = (low + high) / 2 if low and high else 2 * low or high / 2
        tried.append(try_load(load))
        low, high = (load, high) if tried[-1].good else (low, load)
    return tried
