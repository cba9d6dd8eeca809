"""Streaming: reads a long prefix in windows, so that the caller uses one while the next one arrives.

A window has as many blocks as should take WINDOW_S at the rate of the previous window: few over a slow link, whose
reader would wait long for the first ones, and many over a fast link, where every window costs a round of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from cache.results import GetResult
from net.loop.tasks import awaited

WINDOW_S = 0.02
FIRST_BYTES = 1 << 20
GROWTH = 4  # a window is at most this many times as large as the previous one


class Windows:
    """Chooses the number of blocks in the next window: 1 to `most`."""

    def __init__(self, block_bytes: int, most: int) -> None:
        self._block_bytes = block_bytes
        self._most = most
        self.blocks = max(1, min(most, FIRST_BYTES // block_bytes))

    def took(self, blocks: int, seconds: float) -> None:
        """Record that `blocks` blocks arrived in `seconds`."""
        if not blocks:
            return
        most = min(GROWTH * self.blocks, self._most)
        self.blocks = most if seconds * most <= WINDOW_S * blocks else max(1, int(WINDOW_S * blocks / seconds))


async def stream(
    fetch: Callable[[slice], Awaitable[GetResult]], count: int, windows: Windows
) -> AsyncGenerator[GetResult]:
    """Calls fetch(window) for one window of `count` blocks after the other; the next one is fetched while the reader
    uses this one. It ends with the last block or with a result that is shorter than its window. Once closed, no fetch
    is running."""
    now = asyncio.get_running_loop().time

    async def one(part: slice) -> GetResult:
        begin = now()
        result = await fetch(part)
        windows.took(result.blocks, now() - begin)
        return result

    def begin(first: int) -> tuple[slice, asyncio.Task[GetResult]] | None:
        if first >= count:
            return None
        part = slice(first, min(count, first + windows.blocks))
        return part, awaited(one(part))

    coming = begin(0)
    try:
        while coming is not None:
            part, task = coming
            result = await task
            coming = begin(part.stop) if result.blocks == part.stop - part.start else None
            yield result
    finally:
        if coming is not None:
            coming[1].cancel()
            await asyncio.gather(coming[1], return_exceptions=True)  # no caller awaits it any more
