"""Turns: threads that answer for several processes work one at a time, in the order of a FairQueue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from net.rounds.fair_queue import FairQueue

LOOK_S = 0.02
MOST_TURN_S = 10.0
"""A turn that takes longer may never end: those that wait behind it no longer say that they only wait."""


class Turns:
    """`clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queue = FairQueue()
        self._granted: dict[str, threading.Event] = {}
        self._holder: str | None = None
        self._since = 0.0

    @contextmanager
    def turn(self, who: str, work: float, waits: Callable[[bool], None]) -> Iterator[None]:
        """Inside, nobody else works. `waits(True)` is called if that takes time, and `waits(False)` when it does so no
        more, or the one who works has worked for MOST_TURN_S."""
        granted, told = self._ask(who, work), False
        while not granted.wait(LOOK_S if told else 0.0):
            only_waits = self._clock() - self._since < MOST_TURN_S
            if only_waits != told:
                told = only_waits
                waits(told)
            elif not told:
                granted.wait(LOOK_S)
        if told:
            waits(False)
        try:
            yield
        finally:
            self._end()

    def forget(self, who: str) -> None:
        """It asks no more."""
        with self._lock:
            self._queue.forget(who)

    def _ask(self, who: str, work: float) -> threading.Event:
        with self._lock:
            granted = self._granted[who] = threading.Event()
            self._queue.ask(who, work)
            self._grant()
        return granted

    def _end(self) -> None:
        with self._lock:
            self._holder = None
            if len(self._queue):
                self._grant()
            else:
                self._queue.rest()

    def _grant(self) -> None:
        if self._holder is None and len(self._queue):
            self._holder, self._since = self._queue.next(), self._clock()
            self._granted.pop(self._holder).set()
