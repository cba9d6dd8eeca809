"""The clock for code that measures and waits, so that tests can replace it."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The machine's."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.perf_counter()  # uvloop caches loop.time() per turn

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, moment: float) -> None:
        """Return at `moment` and not before: a loop may wake a sleeper up to a millisecond early."""
        while (left := moment - self.now()) > 0:
            await self.sleep(left)
