"""Deadlines of many short waits with one timer: a wait that ends in time, as nearly all do, costs almost nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Deadline:
    """The deadline of one task's wait."""

    task: asyncio.Task[object]
    at: float  # time.monotonic()
    cancelling: int  # requests to cancel the task that are not ours
    expired: bool = False
    taken_back: bool = False  # our request to cancel was withdrawn

    def was_hit(self) -> bool:
        """Call it on CancelledError: whether this deadline caused it, so that it should become a TimeoutError."""
        self.take_back()
        return self.expired and self.task.cancelling() <= self.cancelling

    def extend(self, seconds: float) -> None:
        """Expire `seconds` from now, but never earlier than before."""
        self.at = max(self.at, time.monotonic() + seconds)

    def take_back(self) -> None:
        if self.expired and not self.taken_back:
            self.taken_back = True
            self.task.uncancel()


class Deadlines:
    """Cancels tasks whose time is up, as asyncio.timeout does."""

    def __init__(self) -> None:
        self._running: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def start(self, timeout_s: float) -> Deadline:
        """Start a deadline for the current task; the caller must always `end` it."""
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(task, time.monotonic() + timeout_s, task.cancelling())
        self._running[deadline] = None
        if self._timer is None or deadline.at < self._timer_at:
            self._arm(deadline.at)
        return deadline

    def end(self, deadline: Deadline) -> None:
        self._running.pop(deadline, None)
        if deadline.expired:
            deadline.take_back()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self.close()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._due)

    def _due(self) -> None:
        """Cancel tasks whose time is up. The timer ignores waits that end, so it may find nothing to do."""
        self._timer = None
        now = time.monotonic()
        for deadline in [one for one in self._running if one.at <= now]:
            del self._running[deadline]
            deadline.expired = True
            deadline.task.cancel()
        if self._running:
            self._arm(min(one.at for one in self._running))
