"""Refuses requests on the acceptor while the requests without a first token would fill the queues of the nodes.

Otherwise all requests of a burst are placed before the nodes' queues refuse most of them. The work for refused requests
delays the others, and a client learns of its refusal late. Requests that entered keep their places: first come, first
served. The nodes still refuse what exceeds their queues, because other acceptors send requests too.

A request can have more choices than there are places. If its first choice enters, the others wait for their places.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable

from net.http.common.frontend import Choices, Overloaded

Room = Callable[[], tuple[int, float]]

ROOM_KEPT_S = 0.01
"""A burst asks for the room a thousand times in this time, and the nodes tell their load less often."""


class Gate:
    """Counts the requests without a first token."""

    def __init__(self, room: Room, clock: Callable[[], float] = time.monotonic) -> None:
        """room(): how many requests may wait, and Retry-After in seconds if that number waits."""
        self._ask, self._clock = room, clock
        self._known, self._known_until = (0, 0.0), -float("inf")
        self._inside: dict[Hashable, Choices] = {}
        self._waiting: dict[Hashable, tuple[Choices, asyncio.Future[None]]] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._inside)

    def check(self, arriving: int = 0) -> None:
        """Raises Overloaded if there is no room for one more after `arriving` others that have not entered yet."""
        ahead = len(self._inside) + len(self._waiting) + arriving
        if self._full(ahead):
            raise self._refusal(ahead)

    def _full(self, ahead: int) -> bool:
        return ahead > 0 and ahead >= self._room()[0]

    def _refusal(self, ahead: int) -> Overloaded:
        return Overloaded(f"{ahead} requests already wait for their first token", self._room()[1])

    def _room(self) -> tuple[int, float]:
        now = self._clock()
        if now >= self._known_until:
            self._known, self._known_until = self._ask(), now + ROOM_KEPT_S
        return self._known

    async def enter(self, request: Hashable, choices: Choices, timeout_s: float) -> None:
        """Raises Overloaded: at once for the first of `choices`, after `timeout_s` for one of the others."""
        if not (choices.begun or choices.inside):
            self.check()
        elif self._full(len(self._inside) + len(self._waiting)):
            await self._turn(request, choices, timeout_s)
            return
        self._let_in(request, choices)

    async def _turn(self, request: Hashable, choices: Choices, timeout_s: float) -> None:
        """Wait until `leave` lets the request in."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[request] = choices, turn
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            raise self._refusal(len(self._inside)) from None
        finally:
            self._waiting.pop(request, None)

    def _let_in(self, request: Hashable, choices: Choices) -> None:
        self._inside[request] = choices
        choices.inside += 1

    def leave(self, request: Hashable) -> None:
        """The request has its first token, or ended. May be called again."""
        choices = self._inside.pop(request, None)
        if choices is None:
            return
        choices.inside -= 1
        while self._waiting and not self._full(len(self._inside)):
            first = next(iter(self._waiting))
            choices, turn = self._waiting.pop(first)
            if not turn.done():  # else its client is gone
                self._let_in(first, choices)
                turn.set_result(None)
