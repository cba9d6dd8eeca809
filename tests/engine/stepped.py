"""Nodes that stand still: each has an event loop of its own, all in one thread and under one virtual clock, and real
sockets between them. A loop that is not stepped is what SIGSTOP makes of a process: its sockets stay open, nothing of
it runs, and when it goes on all its timers are due at once."""

from __future__ import annotations

import asyncio
import random
import select
import time
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any

REAL_S = 0.0005  # for the kernel to carry bytes between two sockets of this process


class SteppedLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, and never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._found = False
        wait = self._selector.select

        def look(timeout: float | None) -> list[Any]:
            ready = wait(0)
            self._found = bool(ready)
            return ready

        self._selector.select = look  # type: ignore[method-assign]

    def step(self) -> bool:
        """One turn; False when nothing was to do."""
        busy = bool(self._ready) or self.next_timer() <= self.time()
        events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            events._set_running_loop(None)
        return busy or self._found

    def next_timer(self) -> float:
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]
        return min(times, default=float("inf"))


class World:
    """`now` is what time.monotonic says inside `running`; `at` has the future: (time, what happens then)."""

    def __init__(self, seed: int, monkeypatch: Any) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.loops: dict[str, SteppedLoop] = {}
        self.still: set[str] = set()
        self.after_step: Callable[[], None] = lambda: None
        self._at: list[tuple[float, int, Callable[[], None]]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def add(self, name: str) -> SteppedLoop:
        self.loops[name] = SteppedLoop()
        return self.loops[name]

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._at.append((when, len(self._at), what))
        self._at.sort()

    def pause(self, name: str, seconds: float) -> None:
        self.still.add(name)
        self.at(self.now + seconds, lambda: self.still.discard(name))

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loops[name].create_task(work)

    def wait(self, name: str, work: Coroutine[Any, Any, Any], most_s: float = 600.0) -> Any:
        """The result of `work`, which runs on a node's loop while all others live."""
        task = self.start(name, work)
        self.until(task.done, most_s)
        return task.result()

    def until(self, condition: Callable[[], bool], most_s: float) -> None:
        """Let all live; fails when the condition does not hold after so many virtual seconds."""
        end = self.now + most_s
        while not condition():
            assert self.now <= end, f"not within {most_s:g} virtual seconds"
            if not self._turn():
                select.select([], [], [], REAL_S)
                if not self._turn():
                    self._jump()

    def _turn(self) -> bool:
        """A step of every node that lives, in any order."""
        names = [name for name in self.loops if name not in self.still]
        self.rng.shuffle(names)
        busy = False
        for name in names:
            if name not in self.still:
                busy |= self.loops[name].step()
                self.after_step()
        return busy

    def _jump(self) -> None:
        """To the next thing that happens."""
        timers = [self.loops[name].next_timer() for name in self.loops if name not in self.still]
        due = min([*timers, *(when for when, _, _ in self._at[:1])], default=float("inf"))
        assert due < float("inf"), "everybody waits for ever"
        self.now = max(self.now, due)
        while self._at and self._at[0][0] <= self.now:
            self._at.pop(0)[2]()

    def close(self) -> None:
        for loop in self.loops.values():
            loop.close()
