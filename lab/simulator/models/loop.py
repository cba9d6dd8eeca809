"""The virtual clock: events in order of time; equal times in the order in which they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Action = Callable[..., None]


class Loop:
    """`now` in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = count()

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Call action(*arguments) at `time`, or now if that has passed."""
        heapq.heappush(self._heap, (time if time > self.now else self.now, next(self._order), action, arguments))

    def after(self, seconds: float, action: Action, *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)
        return True

    def run(self) -> None:
        """Run until no event is left."""
        while self.step():
            pass
