"""Seconds of calls, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(work: Callable[[], object], repeats: int, at_least_s: float = 0.0) -> list[float]:
    """Seconds of each call after an uncounted one: `repeats` calls, and more until they took `at_least_s`."""
    work()
    found: list[float] = []
    while len(found) < repeats or sum(found) < at_least_s:
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return found
