"""TCP transport: bulk data on separate connections, received directly into the destination.

    READ   read{id, region, runs} ──>                  WRITE   write{id, region, runs} + bytes ──>
           <── data{id} + bytes ...                            data{id} + bytes ... ──>
           <── fail{id, reason}                                <── done{id}  or  fail{id, reason}
           cancel{id} ──>                                      cancel{id} ──>   <── cancelled{id}

    rail{id} ──>                the first frame on every connection: the dialer's number of it
    cut{id} ──>  <── cut{id}    nothing more is received on that rail, not even bytes that its socket contains

More than HEADER_RUNS_MAX runs are the payload of the request instead of part of its header. Each node dials
`connections` data connections for the bulk that it submits (net.transfer.tcp.bundle), and as many at the first urgent
submission: urgent bytes must not wait behind bulk in the socket's buffers, and bulk waits while they move
(net/channel/send_order.py). They also carry bulk calls
(net/transfer/tcp/bulk_call.py). Bytes may travel coded (net/transfer/tcp/coding.py). Frames have at most FRAME_BYTES,
so concurrent transfers share a connection, and a cancelled one stops at the next frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from net.channel.congestion import check, chosen
from net.channel.connection import Connection, Receiver
from net.channel.links import Links
from net.channel.send_order import SendOrder
from net.errors import PeerLost, PeerRefused
from net.loop.polling import Polling
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span
from net.transfer.common.transport import BULK, URGENT, Op
from net.transfer.tcp.bulk_call import BulkCall, Services
from net.transfer.tcp.bundle import Bundle
from net.transfer.tcp.coding import Coding
from net.transfer.tcp.rail import TcpRail
from net.transfer.tcp.server import Cut, Served

BUSY_POLL_US = 100
PURPOSES = BULK_PURPOSE, URGENT_PURPOSE = "data", "urgent data"
NAMES = {BULK_PURPOSE: "tcp", URGENT_PURPOSE: "tcp-urgent"}  # of rails, with a number


class Tcp:
    """Works wherever a control connection works. `connections` to each peer, and as many for urgent transfers."""

    name = "tcp"

    def __init__(
        self,
        links: Links,
        regions: Mapping[str, Region],
        connections: int = 2,
        busy_poll_us: int = BUSY_POLL_US,
        congestion: str = "auto",
        coding: Coding | None = None,
    ) -> None:
        """busy_poll_us: microseconds for which the event loop may poll for expected bytes; 0: never
        (net/loop/polling.py). congestion: see net.channel.congestion.chosen. coding: of this node alone. Raises
        ValueError."""
        if connections < 1:
            raise ValueError(f"a peer needs at least one data connection, got {connections}: see --tcp-connections")
        self._links = links
        self._regions = regions
        self._connections = connections
        self._busy_poll_us = busy_poll_us
        self._congestion = congestion
        check(congestion)
        self.services = Services()
        self._orders = SendOrder(), SendOrder()  # of the link, and within this host
        self.coding = coding
        if coding is not None:
            coding.link = self._goodput
        self._bundles: dict[tuple[str, str], Bundle] = {}  # by peer id and purpose
        self._dialed: dict[Connection, TcpRail] = {}  # no bundle has them yet
        self._served: set[Served] = set()
        self._cut: Cut = set()
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        for purpose in PURPOSES:
            links.accept(purpose, self._accept, vital=False)

    def _accept(self, connection: Connection) -> Receiver:
        if (name := chosen(self._congestion, connection.within_host)) is not None:
            connection.use_congestion(name)
        connection.order = self._orders[connection.within_host]
        connection.rank = URGENT if connection.purpose == URGENT_PURPOSE else BULK
        if self._busy_poll_us:
            connection.polling = Polling(self._busy_poll_us / 1e6)
        if connection.dialed:
            rail = self._dialed[connection] = TcpRail(connection, self.coding)
            return rail
        connection.expects = ("the next request",)
        return Served(connection, self._regions, self._served, self._cut, self.services, self.coding)

    @property
    def sealed(self) -> bool:
        """Whether connections are sealed with a cluster key."""
        return self._links.sealed

    def offer(self) -> dict[str, Any]:
        return {} if self.coding is None else self.coding.offer()

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        if self.coding is not None:
            self.coding.met(peer_id, offer)
        bundle = await self._bundle(peer_id, BULK_PURPOSE)
        host = bundle.connections()[0].connection.remote_host
        return f"TCP to {host}, {self._connections} connections" if self._connections > 1 else f"TCP to {host}"

    async def _bundle(self, peer_id: str, purpose: str) -> Bundle:
        """Raises PeerLost, PeerRefused."""
        key = peer_id, purpose
        async with self._opening.setdefault(key, asyncio.Lock()):
            bundle = self._bundles.get(key)
            if bundle is not None and bundle.is_open:
                return bundle
            if bundle is not None:
                bundle.end("its data connections are closed", abort=True)
            names = [f"{NAMES[purpose]}{index}" for index in range(self._connections)]
            give_up = partial(self._links.drop, peer_id)
            bundle = self._bundles[key] = Bundle(peer_id, names, partial(self._dial, peer_id, purpose), give_up)
            await bundle.open()
            return bundle

    async def _dial(self, peer_id: str, purpose: str) -> TcpRail:
        try:
            connection = await self._links.dial(peer_id, purpose)
        except PeerRefused as refused:  # the peer has given up this node: drop it, and ask for a path again
            self._links.drop(peer_id, str(refused))
            raise
        rail = self._dialed.pop(connection, None)
        if rail is None:
            raise PeerLost(f"lost {peer_id!r} while opening: {self._links.why_lost(peer_id)}")
        return rail

    def is_open(self, peer_id: str) -> bool:
        """Also True while broken connections are dialed again."""
        bundle = self._bundles.get((peer_id, BULK_PURPOSE))
        return bundle is not None and bundle.alive

    def submit(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Adds no coroutine if the connections are open: every layer adds latency to small transfers."""
        return self._with(
            peer_id, priority, lambda bundle: bundle.submit(op, local, remote, spans, landed, _rank(priority))
        )

    def ask(self, peer_id: str, call: BulkCall, priority: int = BULK) -> Coroutine[Any, Any, None]:
        """See net.transfer.tcp.bulk_call. The peer must be open, as for `submit`."""
        return self._with(peer_id, priority, lambda bundle: bundle.ask(call, _rank(priority)))

    def _with(
        self, peer_id: str, priority: int, work: Callable[[Bundle], Coroutine[Any, Any, None]]
    ) -> Coroutine[Any, Any, None]:
        bundle = self._bundles.get((peer_id, BULK_PURPOSE))
        if bundle is None:
            raise PeerLost(f"the data connections to {peer_id!r} are closed")
        if priority > BULK:
            urgent = self._bundles.get((peer_id, URGENT_PURPOSE))
            if urgent is None or not urgent.alive:
                return self._first_urgent(peer_id, work)
            bundle = urgent
        return work(bundle)

    async def _first_urgent(self, peer_id: str, work: Callable[[Bundle], Coroutine[Any, Any, None]]) -> None:
        path = self._bundles.get((peer_id, BULK_PURPOSE))
        bundle = await self._bundle(peer_id, URGENT_PURPOSE)
        if self._bundles.get((peer_id, BULK_PURPOSE)) is not path:  # the peer's memory may have been reused
            raise PeerLost(f"lost {peer_id!r} while opening: {self._links.why_lost(peer_id)}")
        await work(bundle)

    def share(self, peer_id: str) -> float:
        """Bytes on the wire for each byte that moves, by what was coded lately."""
        return 1.0 if self.coding is None else self.coding.share(peer_id)

    def _goodput(self, peer_id: str) -> float | None:
        """Bytes per second of the faster bundle; None: not measured yet."""
        bundles = [self._bundles.get((peer_id, purpose)) for purpose in PURPOSES]
        rates = [
            sum(rail.bytes_per_s for rail in bundle.rails if rail.measured and rail.up)
            for bundle in bundles
            if bundle is not None
        ]
        return max(rates, default=0.0) or None

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        return [
            rail.row() | {"lane": purpose}
            for purpose in PURPOSES
            if (bundle := self._bundles.get((peer_id, purpose))) is not None
            for rail in bundle.rails
        ]

    def withdraw(self, name: str) -> None:
        for served in list(self._served):
            served.withdraw(name)

    def drop(self, peer_id: str) -> None:
        """Cut the peer's connections: nothing more is received from it."""
        if self.coding is not None:
            self.coding.lost(peer_id)
        for purpose in PURPOSES:
            if (bundle := self._bundles.pop((peer_id, purpose), None)) is not None:
                bundle.end(self._links.why_lost(peer_id), abort=True)
        for served in [one for one in self._served if one.connection.peer_id == peer_id]:
            served.end()
            served.connection.abort()
        for connection in [one for one in self._dialed if one.peer_id == peer_id]:
            self._dialed.pop(connection).connection.abort()
        self._cut -= {key for key in self._cut if key[0] == peer_id}

    async def fence(self, peer_id: str) -> None:
        """Nothing to do: `drop` has cut the connections, which is the fence."""

    async def close(self) -> None:
        for bundle in self._bundles.values():
            bundle.end("this node is closing", abort=False)
        for served in list(self._served):
            served.end()
            served.connection.close()
        for connection in self._dialed:
            connection.close()
        self._bundles.clear()
        self._dialed.clear()


def _rank(priority: int) -> int | None:
    """The rank of a transfer among those of its connections; None = that of the connections."""
    return priority if priority < BULK else None
