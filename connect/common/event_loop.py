"""EventLoop: an event loop in its own thread, for callers that wait."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class EventLoop:
    """`run` and `begin` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or its exception."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`work` runs while the caller goes on. The future's callbacks run in the thread of the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def alive(self) -> bool:
        """Whether the thread runs: not when the interpreter is ending."""
        return self._thread.is_alive() and not sys.is_finalizing()

    def end_with(self, work: Coroutine[Any, Any, object]) -> None:
        """Close when `work` has ended; this does not wait."""
        last = asyncio.run_coroutine_threadsafe(work, self._loop)
        last.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))

    def close(self) -> None:
        """The work has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
