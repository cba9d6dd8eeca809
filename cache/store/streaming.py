"""Streaming: reads a long prefix in windows, so that the caller uses one while the next one arrives.

A window has what should take WINDOW_S at the rate at which the one before it came: few blocks over a slow link, whose
reader would wait long for its first ones, many over a fast one, where every window costs a round of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from cache.results import GetResult
from net.loop.tasks import awaited

WINDOW_S = 0.02
FIRST_BYTES = 1 << 20
GROWTH = 4  # times as large as the one before, at most


class Windows:
    """How many blocks come next: 1 to `most`."""

    def __init__(self, block_bytes: int, most: int) -> None:
        self._block_bytes = block_bytes
        self._most = most
        self.blocks = max(1, min(most, FIRST_BYTES // block_bytes))

    def took(self, blocks: int, seconds: float) -> None:
        """So many have come in that time."""
        if not blocks:
            return
        most = min(GROWTH * self.blocks, self._most)
        self.blocks = most if seconds * most <= WINDOW_S * blocks else max(1, int(WINDOW_S * blocks / seconds))


async def stream(
    fetch: Callable[[slice], Awaitable[GetResult]], count: int, windows: Windows
) -> AsyncGenerator[GetResult]:
    """fetch(window) for one window of `count` blocks after the other, the next one under way while the reader has this
    one; it ends with the last block or with a result that is shorter than its window. Once closed, nothing is under
    way."""
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
