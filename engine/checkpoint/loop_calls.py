"""LoopCalls: runs coroutines on an event loop for threads that wait for their results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopCalls:
    """Create it on the loop; other threads call `wait`. `stop` releases them before the loop waits for the threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] | None = set()  # None: stopped

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises its exceptions, and CancelledError after `stop`."""
        with self._lock:
            if self._calls is None:
                work.close()
                raise asyncio.CancelledError
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        try:
            return call.result()
        finally:
            with self._lock:
                if self._calls is not None:
                    self._calls.discard(call)

    def stop(self) -> None:
        """Idempotent."""
        with self._lock:
            calls, self._calls = self._calls or set(), None
        for call in calls:
            call.cancel()
