"""EventLoop: an event loop in its own thread, for callers that wait."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

import uvloop

from net.loop.tasks import cancel_others

T = TypeVar("T")
LAST_S = 5.0  # work that is cancelled by `close` has this long to end


class LoopClosed(RuntimeError):
    """The loop was closed before the work has ended, or it runs in the process from which this one was forked."""


class EventLoop:
    """`run` and `begin` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._closes_itself = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        if self._closes_itself:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or its exception. Raises LoopClosed."""
        try:
            return ended(self.begin(work))
        except CancelledError:
            raise LoopClosed("the event loop was closed meanwhile") from None

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`work` runs while the caller goes on. The future's callbacks run in the thread of the loop. It is cancelled
        if the loop is closed before its end. Raises LoopClosed."""
        if os.getpid() != self._process:  # a forked child has no such thread, so it would wait for ever
            work.close()
            raise LoopClosed("the event loop runs in the process from which this one was forked")
        with self._closing:  # work that begins while the loop stops would never run
            if self._closed:
                work.close()
                raise LoopClosed("the event loop is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def alive(self) -> bool:
        """Whether the thread runs: not when the interpreter is ending, and not in a forked child."""
        return self._thread.is_alive() and not sys.is_finalizing()

    def end_with(self, work: Coroutine[Any, Any, object]) -> None:
        """Close when `work` has ended; this does not wait."""
        self._closes_itself = True
        last = asyncio.run_coroutine_threadsafe(work, self._loop)
        last.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))

    def close(self) -> None:
        """Cancel what still runs, so that nobody waits for it for ever. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(cancel_others(LAST_S), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def ended(begun: Future[T]) -> T:
    """The result, or the exception. An exception of a signal (Ctrl-C) waits for the end, too: until then the work uses
    memory of the caller, who may free it."""
    try:
        return begun.result()
    except BaseException:
        wait([begun])
        raise
