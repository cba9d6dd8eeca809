"""Refuses requests on the acceptor while the requests without a first token would fill the queues of the nodes.

Otherwise all requests of a burst are placed before the nodes' queues refuse most of them. The work for refused requests
delays the others, and a client learns of its refusal late. Requests that entered keep their places: first come, first
served. The nodes still refuse what exceeds their queues, because other acceptors send requests too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from net.http.common.frontend import Overloaded

Room = Callable[[], tuple[int, float]]

ROOM_KEPT_S = 0.01
"""A burst asks for the room a thousand times in this time, and the nodes tell their load less often."""


class Gate:
    """Counts the requests without a first token."""

    def __init__(self, room: Room, clock: Callable[[], float] = time.monotonic) -> None:
        """room(): how many requests may wait, and Retry-After in seconds if that number waits."""
        self._ask, self._clock = room, clock
        self._known, self._known_until = (0, 0.0), -float("inf")
        self._inside: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._inside)

    def check(self, arriving: int = 0) -> None:
        """Raises Overloaded if there is no room for one more after `arriving` others that have not entered yet."""
        ahead = len(self._inside) + arriving
        if not ahead:
            return
        places, retry_after_s = self._room()
        if ahead >= places:
            raise Overloaded(f"{ahead} requests already wait for their first token", retry_after_s)

    def _room(self) -> tuple[int, float]:
        now = self._clock()
        if now >= self._known_until:
            self._known, self._known_until = self._ask(), now + ROOM_KEPT_S
        return self._known

    def enter(self, request: Hashable) -> None:
        """Raises Overloaded."""
        self.check()
        self._inside.add(request)

    def leave(self, request: Hashable) -> None:
        """The request has its first token, or ended. May be called again."""
        self._inside.discard(request)
