"""The order in which the transfers of one node may send: the most urgent first, on all its data connections together.

Kernels share a link evenly among connections, so a node holds its less urgent frames back while more urgent bytes are
on their way: defer and promote, as MFS does (arXiv 2603.17456), with two limits. A frame that has waited for DEFER_S is
sent, so that nothing starves. And bytes hold back only those with which they compete: all to the same peer, and those
to others if they move at about an even share, or more, of the best rate at which this node has sent. What moves more
slowly has another limit than this node's link, such as its peer's, and would not be faster if others waited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

DEFER_S = 0.5
"""The longest wait of one frame."""

LINGER_S = 0.005
"""After a piece of a large transfer its next piece is on its way: a peer asks for it when this one has arrived."""

LOOK_S = 0.05
"""Rates are those of this time. Bytes that do not move in it hold nothing back."""

FAIR = 0.5
"""Part of an even share: kernels do not share exactly."""

BEST_HALVES_S = 600.0
"""The best rate counts half after this time: links rarely become slower."""

KNOWN_S = 2.0
"""A connection that sends again within this time is taken for as fast as before; a later one competes until it has been
measured."""


class Sender(Protocol):
    """A connection."""

    peer_id: str

    def delivered(self) -> int:
        """Bytes that have arrived at the peer so far."""


@dataclass(slots=True, eq=False)
class _Flow:
    """A connection on which transfers are sending."""

    peer_id: str
    since: float  # when the measurement began, and what had arrived by then
    seen: int
    rate: float | None  # bytes per second at the last one; None: not known yet
    ranks: list[int] = field(default_factory=list)  # of the transfers


class SendOrder:
    """A greater rank is more urgent. One per node and link; its methods are called on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flows: dict[Sender, _Flow] = {}
        self._rates: WeakKeyDictionary[Sender, tuple[float | None, float]] = WeakKeyDictionary()  # (rate, until when)
        self._best = 0.0  # bytes per second of all together
        self._looked_at = float("-inf")
        self._moved = 0  # bytes since then on connections that have stopped sending
        self._changed: asyncio.Future[None] | None = None
        self._lingers: dict[int, float] = {}  # rank -> until when

    @contextmanager
    def sending(self, rank: int, sender: Sender, large: bool) -> Iterator[None]:
        """While a transfer has bytes to send. large: it may be a piece of a larger one."""
        if (flow := self._flows.get(sender)) is None:
            flow = self._flows[sender] = self._begun(sender)
        flow.ranks.append(rank)
        try:
            yield
        finally:
            flow.ranks.remove(rank)
            if not flow.ranks:
                self._ended(sender)
            if large:
                self.linger(rank)
            if self._changed is not None:
                self._changed.set_result(None)
                self._changed = None

    def linger(self, rank: int) -> None:
        """A piece of a large transfer was sent."""
        self._lingers[rank] = self._clock() + LINGER_S

    def alone(self, rank: int, peer_id: str) -> bool:
        """Whether only transfers of this rank are sending."""
        ranks = {one for flow in self._flows.values() for one in flow.ranks}
        return ranks <= {rank} and not self.is_behind(rank, peer_id)

    async def turn(self, rank: int, peer_id: str, end: asyncio.Future[Any] | None = None) -> bool:
        """Wait while more urgent bytes compete with those to this peer, at most for DEFER_S, or until `end` is done.
        Whether it has waited for DEFER_S: then the next frame is sent in any case."""
        until = self._clock() + DEFER_S
        while self.is_behind(rank, peer_id):
            if end is not None and end.done():
                return False
            if (left := until - self._clock()) <= 0:
                return True
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            pause_s = LOOK_S if self._ahead(rank) else LINGER_S
            waits_for = [self._changed] if end is None else [self._changed, end]
            await asyncio.wait(waits_for, timeout=min(left, pause_s), return_when=asyncio.FIRST_COMPLETED)
        return False

    def is_behind(self, rank: int, peer_id: str) -> bool:
        """Whether more urgent bytes compete with those to this peer."""
        now = self._clock()
        self._look(now)
        if any(lingers > rank and now < until for lingers, until in self._lingers.items()):
            return True
        return any(self._holds_back(flow, peer_id) for flow in self._ahead(rank))

    def _ahead(self, rank: int) -> list[_Flow]:
        return [flow for flow in self._flows.values() if max(flow.ranks) > rank]

    def _holds_back(self, flow: _Flow, peer_id: str) -> bool:
        if flow.rate is None:
            return True
        return flow.rate > 0 and (flow.peer_id == peer_id or flow.rate >= FAIR * self._best / len(self._flows))

    # --- rates

    def _begun(self, sender: Sender) -> _Flow:
        now = self._clock()
        rate, until = self._rates.pop(sender, (None, now))
        return _Flow(sender.peer_id, now, sender.delivered(), rate if now < until else None)

    def _ended(self, sender: Sender) -> None:
        now = self._clock()
        self._look(now)
        flow = self._flows.pop(sender)
        self._moved += sender.delivered() - flow.seen
        self._rates[sender] = flow.rate, now + KNOWN_S

    def _look(self, now: float) -> None:
        """Measure all rates, if it is time."""
        past_s = now - self._looked_at
        if past_s < LOOK_S:
            return
        moved = self._moved
        for sender, flow in self._flows.items():
            arrived, took_s = sender.delivered(), now - flow.since
            moved += arrived - flow.seen
            if took_s >= LOOK_S / 2:
                flow.rate = (arrived - flow.seen) / took_s
            flow.seen, flow.since = arrived, now
        self._best = max(self._best * 0.5 ** (past_s / BEST_HALVES_S), moved / past_s)
        self._looked_at, self._moved = now, 0
