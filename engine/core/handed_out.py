"""Which steps have been handed out: who takes a request out of the batch waits for the tokens of its last step."""

from __future__ import annotations

import asyncio


class HandedOut:
    """Counts the steps of a worker. One step is computed at a time; its results are handed out during the next one."""

    def __init__(self) -> None:
        self._submitted = self._done = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def submitted(self) -> None:
        """The engine thread computes a step now."""
        self._submitted += 1

    def done(self) -> None:
        """The oldest submitted step has been handed out, or it has failed."""
        self._done += 1
        self._release()

    def ended(self) -> None:
        """There will be no more steps."""
        self._done = self._submitted
        self._release()

    async def all(self, running: bool) -> None:
        """Wait until every step so far has been handed out, the running one included or not."""
        due = self._submitted if running else self._submitted - 1
        if self._done >= due:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((due, turn))
        await turn

    def _release(self) -> None:
        for _, turn in (one for one in self._waiting if one[0] <= self._done):
            if not turn.done():
                turn.set_result(None)
        self._waiting = [one for one in self._waiting if one[0] > self._done]
