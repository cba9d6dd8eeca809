"""The clock for code that measures and waits, so that tests can replace it."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; never decreases."""
        return time.perf_counter()  # uvloop caches loop.time() per turn

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, moment: float) -> None:
        """Return at `moment`, never earlier: a loop may wake a sleeper up to a millisecond early."""
        while (left := moment - self.now()) > 0:
            await self.sleep(left)


def loop_time() -> float:
    """Seconds on the running event loop's clock, which it reads once per turn."""
    return asyncio.get_running_loop().time()
