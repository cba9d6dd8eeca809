"""Batches: transfers that run while the caller goes on, by number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

OK, FAILED = 0, -1
DONE, RUNNING = 1, 0
THREADS = 4


class Batches:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mooncake-transfer")
        self._running: dict[int, Future[int]] = {}
        self._next = 1

    def begin(self, work: Callable[[], int]) -> int:
        """Its number; `work` returns 0 or a code of an error."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._running[number] = self._threads.submit(work)
        return number

    def status(self, number: int) -> int:
        """1: done, 0: running, -1: failed, or no such number. 1 and -1 free it."""
        batch = self._running.get(number)
        if batch is not None and not batch.done():
            return RUNNING
        with self._lock:
            batch = self._running.pop(number, None)
        return DONE if batch is not None and batch.result() == OK else FAILED

    def wait(self, numbers: Sequence[int]) -> int:
        """Wait for all and free them. 0 if all are done; -1 if one failed, or if a number is unknown."""
        with self._lock:
            batches = [self._running.pop(number, None) for number in numbers]
        ends = [FAILED if batch is None else batch.result() for batch in batches]
        return OK if all(end == OK for end in ends) else FAILED

    def close(self) -> None:
        """Begin no more. Does not wait."""
        self._threads.shutdown(wait=False)
