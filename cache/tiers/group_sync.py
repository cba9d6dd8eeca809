"""GroupSync: all callers that wait for the disk share its next sync (group commit)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from net.loop.tasks import spawn

log = logging.getLogger(__name__)


class GroupSync:
    """`sync()` blocks, in a separate thread, and returns whether everything written before is on disk."""

    def __init__(self, sync: Callable[[], bool]) -> None:
        self._sync = sync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssd-durable")
        self._waiting: list[asyncio.Future[bool]] = []
        self._task: asyncio.Task[None] | None = None

    async def synced(self, timeout_s: float) -> bool:
        """Whether a sync that began after this call succeeded within `timeout_s`."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if self._task is None:
            self._task = spawn(self._run(), "durable syncs")
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return False

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            good = False
            try:
                good = await asyncio.get_running_loop().run_in_executor(self._thread, self._sync)
            except Exception:  # a bug: no caller may be told that its data is on disk
                log.exception("a sync failed")
            for waiter in group:
                if not waiter.done():
                    waiter.set_result(good)
        self._task = None

    async def close(self) -> None:
        """Wait for the running sync to end."""
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=True)
