"""StallMonitor: how long an event that arrives now has to wait for the event loop, and what it waits for.

A thread sends the loop a callback every PERIOD_S and takes the time until it runs. While one is late, the thread
notes where the loop's thread is. Lateness has three causes: a handler that computes, the interpreter lock in another
thread's hands, and a core that is not ours; the processor time of the loop's thread tells the first from the others.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PERIOD_S = 0.02
SLOW_S = 0.002
"""Our promise: no handler keeps the loop longer. Beyond it the place is noted."""

KEPT_SAMPLES = 3000
MAX_PLACES = 100
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Place:
    """Stalls that were seen at one line of our code."""

    count: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class StallMonitor:
    """Watches the running loop from `start` to `close`. `observe` gets every lateness in seconds, on the loop."""

    def __init__(self, observe: Callable[[float], None] = lambda seconds: None) -> None:
        self._observe = observe
        self._late: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)  # (lateness, of it computing), seconds
        self._longest = (0.0, 0.0)
        self._count = 0
        self._places: dict[str, Place] = {}
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(loop, loop_thread), name="stalls", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Must run on the loop: the thread may be waiting for its callback."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def longest_s(self) -> float:
        """The longest lateness since the start."""
        return self._longest[0]

    def state(self) -> dict[str, Any]:
        """For /debug/state, milliseconds: `computing` is the part that the loop's thread spent on a processor."""
        late = sorted(seconds for seconds, _ in self._late)
        computing = sorted(seconds for _, seconds in self._late)
        places = self._places.copy()  # at once: the thread may add one
        return {
            "samples": self._count,
            "late_ms": _percentiles(late),
            "computing_ms": _percentiles(computing),
            "longest_ms": {"late": 1000 * self._longest[0], "computing": 1000 * self._longest[1]},
            "places": {
                name: {"count": p.count, "ms": 1000 * p.seconds, "longest_ms": 1000 * p.longest_s}
                for name, p in sorted(places.items(), key=lambda item: -item[1].seconds)[:10]
            },
        }

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        clock = time.pthread_getcpuclockid(loop_thread)
        while not self._stop.wait(PERIOD_S):
            self._answered.clear()
            before, sent = time.clock_gettime(clock), time.perf_counter()
            try:
                loop.call_soon_threadsafe(self._answer, sent)
            except RuntimeError:  # the loop was closed
                return
            place = None
            while not self._answered.wait(SLOW_S) and not self._stop.is_set():
                place = place or _place(sys._current_frames().get(loop_thread))
            late = self._count and self._late[-1][0]
            self._note(late, min(late, time.clock_gettime(clock) - before), place)

    def _answer(self, sent: float) -> None:
        """Runs on the loop."""
        late = time.perf_counter() - sent
        self._late.append((late, 0.0))
        self._count += 1
        self._answered.set()
        self._observe(late)

    def _note(self, late: float, computing: float, place: str | None) -> None:
        if not self._answered.is_set():
            return
        self._late[-1] = (late, computing)
        self._longest = (max(self._longest[0], late), max(self._longest[1], computing))
        if place is not None and late > SLOW_S and (place in self._places or len(self._places) < MAX_PLACES):
            entry = self._places.setdefault(place, Place())
            entry.count += 1
            entry.seconds += late
            entry.longest_s = max(entry.longest_s, late)


def _place(frame: FrameType | None) -> str:
    """The innermost line of our code that the frame is in, and the function it called; 'the event loop' when none."""
    inner = frame
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            name = f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
            return name if inner is frame or inner is None else f"{name} > {inner.f_code.co_name}"
        frame = frame.f_back
    return "the event loop" if inner is None else f"the event loop > {inner.f_code.co_name}"


def _percentiles(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {f"p{p}": 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99, 100)}
