"""The exception handler of a node's event loop. It logs and counts every failure that no caller awaits, and makes the
node leave if it cannot work without the failed part."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from net.loop.tasks import FINAL, TASK

log = logging.getLogger("mooncake.node")

UNNAMED = "unnamed"  # 'Task exception was never retrieved', an exception in a callback


class Supervisor:
    """Install it inside the running loop, once per process: all threads share one handler."""

    def __init__(self, count: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        """count(name): a background task of that name failed; give_up(reason): the node cannot continue."""
        self._count = count
        self._give_up = give_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before = threading.excepthook

    def install(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self.failed)
        self._before, threading.excepthook = threading.excepthook, self._thread_failed

    def remove(self) -> None:
        """Idempotent."""
        if self._loop is not None:
            self._loop.set_exception_handler(None)
            threading.excepthook = self._before
            self._loop = None

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The handler that asyncio calls. `context` may contain the keys of net/loop/tasks.py."""
        name = context.get(TASK, UNNAMED)
        self._count(name)
        error = context.get("exception")
        facts = {key: value for key, value in context.items() if key not in (TASK, FINAL)}
        loop.default_exception_handler(facts)
        if context.get(FINAL):
            self._give_up(f"background task {name!r} failed: {type(error).__name__}: {error}")

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Runs on the thread that ends."""
        name = failed.thread.name if failed.thread is not None else UNNAMED
        loop = self._loop
        if loop is None or failed.exc_type is SystemExit:
            return
        context = {"message": f"an exception ended thread {name!r}", "exception": failed.exc_value, TASK: name}
        try:
            loop.call_soon_threadsafe(self.failed, loop, context)
        except RuntimeError:  # the loop is closed
            log.error("an exception ended thread %r", name, exc_info=failed.exc_value)
