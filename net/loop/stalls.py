"""StallMonitor: measures how long an event has to wait for the event loop, and why.

A thread sends the loop a callback every PERIOD_S and measures from its due time until it runs: while another thread
holds the interpreter lock, the sender cannot send either. Linux's counts for the loop's thread separate three causes:

    computing   a handler ran: processor time of the thread
    core        the thread was ready but had no core: the scheduler's run delay (/proc/.../schedstat)
    lock        the rest: another thread held the interpreter lock, or a call blocked

While a callback is late, the thread records the position of the loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

PERIOD_S = 0.05
"""Watching 50 times per second took one percent of a core."""

SLOW_S = 0.002
"""Our promise: no handler holds the loop longer. Above it, the place is recorded."""

LEAD_S = 0.001
"""The counts are read this long before a callback is due, to include a loop that held the lock until then."""

WAKING_S = 0.0003
"""The sender may wake this late after its sleep; it does not count as the loop's lateness."""

KEPT_SAMPLES = 1200
MAX_PLACES = 100
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait for the loop, in seconds; `late` is the sum of the causes."""

    late: float
    computing: float
    core: float
    lock: float


@dataclass(slots=True)
class Place:
    """Stalls at one line of our code."""

    count: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class StallMonitor:
    """Watches the running loop from `start` to `close`. `observe` is called on the loop with every wait."""

    def __init__(self, observe: Callable[[Stall], None] = lambda stall: None) -> None:
        self._observe = observe
        self._stalls: deque[Stall] = deque(maxlen=KEPT_SAMPLES)
        self._longest = Stall(0.0, 0.0, 0.0, 0.0)
        self._count = 0
        self._places: dict[str, Place] = {}
        self._answered = threading.Event()
        self._answered_s = 0.0  # time of the answer on the monotonic clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._usage: Usage | None = None  # of the loop's thread, on which it is closed: callbacks there still read it

    def start(self) -> None:
        loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
        usage = self._usage = Usage(loop_thread, threading.get_native_id())
        self._thread = threading.Thread(target=self._watch, args=(loop, loop_thread, usage), name="stalls", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Must run on the loop: the thread may be waiting for its callback."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._usage is not None:
            self._usage.close()

    @property
    def longest_s(self) -> float:
        """The longest wait since the start."""
        return self._longest.late

    def state(self) -> dict[str, Any]:
        """For /debug/state, in milliseconds; separate percentiles of the last KEPT_SAMPLES for each cause."""
        stalls = list(self._stalls)
        places = self._places.copy()  # one atomic call: the thread may add a place
        return {
            "samples": self._count,
            **{f"{f.name}_ms": _percentiles([getattr(s, f.name) for s in stalls]) for f in fields(Stall)},
            "longest_ms": {f.name: 1000 * getattr(self._longest, f.name) for f in fields(Stall)},
            "places": {
                name: {"count": p.count, "ms": 1000 * p.seconds, "longest_ms": 1000 * p.longest_s}
                for name, p in sorted(places.items(), key=lambda item: -item[1].seconds)[:10]
            },
        }

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int, usage: Usage) -> None:
        own = Usage(threading.get_ident(), threading.get_native_id())
        due = time.perf_counter() + PERIOD_S
        before, mine = usage.read(), own.read()
        while True:
            self._stop.wait(due - LEAD_S - time.perf_counter())
            if time.perf_counter() < due:
                before, mine = usage.read(), own.read()
                self._stop.wait(due - time.perf_counter())
            if self._stop.is_set():
                break
            self._answered.clear()
            # A sender without a core learns nothing about the loop.
            overdue = time.perf_counter() - due - (own.read().delayed - mine.delayed)
            sent = time.perf_counter() - (overdue if overdue > WAKING_S else 0.0)
            try:
                loop.call_soon_threadsafe(self._answer, sent, usage, before)
            except RuntimeError:  # the loop was closed
                break
            before, mine, place = usage.read(), own.read(), None
            while not self._answered.wait(SLOW_S) and not self._stop.is_set():
                place = place or _place(sys._current_frames().get(loop_thread))
            if place is not None and self._answered.is_set():
                self._note(place, self._stalls[-1].late)
            due = max(due, self._answered_s) + PERIOD_S
        own.close()

    def _answer(self, sent: float, usage: Usage, before: Used) -> None:
        """Runs on the loop."""
        self._answered_s, now = time.perf_counter(), usage.read()
        late = self._answered_s - sent
        computing = min(late, now.computed - before.computed)
        core = min(late - computing, max(0.0, now.delayed - before.delayed))
        stall = Stall(late, computing, core, late - computing - core)
        self._stalls.append(stall)
        self._longest = max(self._longest, stall, key=lambda one: one.late)
        self._count += 1
        self._answered.set()
        self._observe(stall)

    def _note(self, place: str, late: float) -> None:
        if late > SLOW_S and (place in self._places or len(self._places) < MAX_PLACES):
            entry = self._places.setdefault(place, Place())
            entry.count += 1
            entry.seconds += late
            entry.longest_s = max(entry.longest_s, late)


@dataclass(frozen=True, slots=True)
class Used:
    """Times of one thread since its start, in seconds."""

    computed: float  # on a processor
    delayed: float  # ready to run, without a core


class Usage:
    """Linux's counts for a thread of this process. A kernel without scheduler statistics reports no delay."""

    def __init__(self, thread: int, native_id: int) -> None:
        """The thread's `ident` and `native_id`."""
        self._clock = time.pthread_getcpuclockid(thread)
        try:
            self._file: int | None = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def read(self) -> Used:
        """After `close` the delay is 0."""
        delayed = 0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1])
        return Used(time.clock_gettime(self._clock), delayed / 1e9)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _place(frame: FrameType | None) -> str:
    """The innermost line of our code on the stack, and the function that it called; else 'the event loop'."""
    inner = frame
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            name = f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
            return name if inner is frame or inner is None else f"{name} > {inner.f_code.co_name}"
        frame = frame.f_back
    return "the event loop" if inner is None else f"the event loop > {inner.f_code.co_name}"


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99, 100)}
