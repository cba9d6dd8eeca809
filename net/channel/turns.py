"""Turns: the transfers of one connection each send one frame per turn of the loop, in the order of their requests."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """With any number of transfers, a turn of the loop passes one large frame to the socket. This bounds how long the
    loop is busy with sending."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    def take(self) -> bool:
        """Take this turn, unless another transfer has used it or waits for it."""
        if self._taken or self._waiting:
            return False
        self._begin()
        return True

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        if not self.take():
            mine = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            await mine

    def _begin(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._taken = False
        while self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():  # it may have been cancelled
                self._begin()
                next_one.set_result(None)
                return
