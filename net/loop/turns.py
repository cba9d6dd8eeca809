"""Lets tasks continue in the order in which they came, a few per turn of the event loop.

A thousand requests that arrive together would otherwise do their first work in one turn, and everything else, such as a
refusal or the next token of another request, would wait for all of it.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4


class Turns:
    """One queue of tasks."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for this task's turn; at least until the next turn of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._next)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        begun = 0
        while self._waiting and begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                begun += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
