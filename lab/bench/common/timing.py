"""Seconds of calls: one after the other, or of contenders in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


def timed(work: Callable[[], object], repeats: int, at_least_s: float = 0.0) -> list[float]:
    """Seconds of each call after an uncounted one: `repeats` calls, and more until they took `at_least_s`."""
    work()
    found: list[float] = []
    while len(found) < repeats or sum(found) < at_least_s:
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return found


def best_in_turns(seconds: float, *contenders: Sequence[Callable[[], object]]) -> list[list[float]]:
    """The best seconds of each call of each contender. The contenders take turns until they took `seconds` each, one
    round at least."""
    best = [[float("inf")] * len(calls) for calls in contenders]
    for calls in contenders:
        calls[0]()
    began = time.perf_counter()
    while True:
        for found, calls in zip(best, contenders, strict=True):
            for i, call in enumerate(calls):
                start = time.perf_counter()
                call()
                found[i] = min(found[i], time.perf_counter() - start)
        if time.perf_counter() - began >= seconds * len(contenders):
            return best
