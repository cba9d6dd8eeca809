"""The order in which the transfers of one node may send: the most urgent first, on all its data connections together.

Kernels share a link evenly among connections, so a node holds its less urgent frames back while more urgent bytes are
on their way: defer and promote, as MFS does (arXiv 2603.17456), with two limits. A frame that has waited for DEFER_S is
sent, so that nothing starves. Bytes that a slow peer does not take hold nothing back: its link is not the one that the
others need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DEFER_S = 0.5
"""The longest wait of one frame."""

LINGER_S = 0.005
"""After a piece of a large transfer its next piece is on its way: a peer asks for it when this one has arrived."""

STALL_S = 0.05
"""Bytes that have not moved for this long hold nothing back."""


@dataclass(slots=True, eq=False)
class _Sending:
    rank: int
    passed: Callable[[], int]
    seen: int = -1
    moves: bool = True  # since the last look


class SendOrder:
    """A greater rank is more urgent. One per node; its methods are called on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sending: dict[_Sending, None] = {}
        self._changed: asyncio.Future[None] | None = None
        self._looked_at = float("-inf")
        self._lingers: dict[int, float] = {}  # rank -> until when

    @contextmanager
    def sending(self, rank: int, passed: Callable[[], int], large: bool) -> Iterator[None]:
        """While a transfer has bytes to send. passed(): bytes that the socket has taken so far; large: it may be a
        piece of a larger one."""
        one = _Sending(rank, passed)
        self._sending[one] = None
        try:
            yield
        finally:
            del self._sending[one]
            if large:
                self.linger(rank)
            if self._changed is not None:
                self._changed.set_result(None)
                self._changed = None

    def linger(self, rank: int) -> None:
        """A piece of a large transfer was sent."""
        self._lingers[rank] = self._clock() + LINGER_S

    def alone(self, rank: int) -> bool:
        """Whether only transfers of this rank are sending."""
        return all(one.rank == rank for one in self._sending) and not self.is_behind(rank)

    async def turn(self, rank: int, end: asyncio.Future[Any] | None = None) -> bool:
        """Wait while more urgent bytes are moving, at most for DEFER_S, or until `end` is done. Whether it has waited
        for DEFER_S: then the next frame is sent in any case."""
        until = self._clock() + DEFER_S
        while self.is_behind(rank):
            if end is not None and end.done():
                return False
            if (left := until - self._clock()) <= 0:
                return True
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            pause_s = STALL_S if any(one.rank > rank for one in self._sending) else LINGER_S
            waits_for = [self._changed] if end is None else [self._changed, end]
            await asyncio.wait(waits_for, timeout=min(left, pause_s))
        return False

    def is_behind(self, rank: int) -> bool:
        """Whether more urgent bytes are moving."""
        now = self._clock()
        if any(lingers > rank and now < until for lingers, until in self._lingers.items()):
            return True
        ahead = [one for one in self._sending if one.rank > rank]
        if ahead and now - self._looked_at >= STALL_S:
            self._looked_at = now
            for one in self._sending:
                passed = one.passed()
                one.moves, one.seen = passed != one.seen, passed
        return any(one.moves for one in ahead)
