"""TCP transport: bulk on a connection of its own, received straight into the destination.

    READ   read{id, region} + runs ──>                 WRITE   write{id, region} + runs ──>
           <── data{id} + bytes ...                            data{id} + bytes ... ──>
           <── fail{id, reason}                                <── done{id}  or  fail{id, reason}
           cancel{id} ──>                                      cancel{id} ──>   <── cancelled{id}

Each node dials one data connection for what it submits. Bytes travel in frames of at most FRAME, so concurrent
transfers share the connection and a cancelled one stops at the next frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from net.connection import Connection, Receiver
from net.errors import PeerLost, TransferError
from net.links import Links
from net.memory import Region
from net.spans import Cursor, Span, pack, runs
from net.tcp_server import Served, push
from net.transport import Op
from net.wire import Frame, FrameError, Header, encode, nowhere

CANCEL_S = 5.0  # a peer that does not answer a cancelled WRITE for so long is given up


class Tcp:
    """Works everywhere a control connection works."""

    name = "tcp"

    def __init__(self, links: Links, regions: Mapping[str, Region]) -> None:
        self._links = links
        self._regions = regions
        self._rails: dict[str, _Rail] = {}
        self._served: set[Served] = set()
        self._dialing: dict[str, asyncio.Lock] = {}
        links.accept("data", self._accept)

    def _accept(self, connection: Connection) -> Receiver:
        if connection.dialed:
            return _Rail(connection, self._rails)
        return Served(connection, self._regions, self._served)

    def offer(self) -> dict[str, Any]:
        return {}

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        if peer_id not in self._rails:
            async with self._dialing.setdefault(peer_id, asyncio.Lock()):
                if peer_id not in self._rails:
                    await self._links.dial(peer_id, "data")  # `_accept` enters the rail
        if (rail := self._rails.get(peer_id)) is None:
            raise PeerLost(f"lost {peer_id!r} while opening: {self._links.why_lost(peer_id)}")
        return f"TCP to {rail.connection.remote_host}"

    def is_open(self, peer_id: str) -> bool:
        return peer_id in self._rails

    async def submit(self, peer_id: str, op: Op, local: Region, remote: str, spans: Sequence[Span]) -> None:
        rail = self._rails.get(peer_id)
        if rail is None:
            raise PeerLost(f"the data connection to {peer_id!r} is closed")
        here, there, lengths = zip(*spans, strict=True)
        ours = Cursor(local.memory, runs(here, lengths))
        theirs = runs(there, lengths)
        if op is Op.READ:
            await rail.read(ours, remote, theirs)
        else:
            try:
                await rail.write(ours, remote, theirs)
            except _Unresponsive as error:
                self._links.drop(peer_id, str(error))
                raise asyncio.CancelledError from None

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        return []

    def withdraw(self, name: str) -> None:
        for served in self._served:
            served.withdraw(name)

    def drop(self, peer_id: str) -> None:
        """Cut its connections: nothing more of it is received."""
        if (rail := self._rails.pop(peer_id, None)) is not None:
            rail.end(self._links.why_lost(peer_id))
            rail.connection.abort()
        for served in [one for one in self._served if one.connection.peer_id == peer_id]:
            served.end()
            served.connection.abort()

    async def fence(self, peer_id: str) -> None:
        """Cutting the connection was the fence."""

    async def close(self) -> None:
        for rail in list(self._rails.values()):
            rail.end("this node is closing")
            rail.connection.close()
        for served in list(self._served):
            served.end()
            served.connection.close()
        self._rails.clear()


class _Unresponsive(Exception):
    """The peer does not answer a cancel."""


@dataclass(slots=True, eq=False)
class _Transfer:
    op: Op
    ours: Cursor
    done: asyncio.Future[None]
    stopped: asyncio.Future[None] | None = None  # present once a WRITE is being cancelled


class _Rail:
    """The submitting end of a data connection."""

    def __init__(self, connection: Connection, rails: dict[str, _Rail]) -> None:
        self.connection = connection
        self._rails = rails
        self._ids = count(1)
        self._transfers: dict[int, _Transfer] = {}
        rails[connection.peer_id] = self

    async def read(self, ours: Cursor, region: str, theirs: Sequence[tuple[int, int]]) -> None:
        transfer_id, transfer = self._begin(Op.READ, ours)
        try:
            self.connection.send({"op": "read", "id": transfer_id, "region": region}, [pack(theirs)])
            await transfer.done
        except asyncio.CancelledError:
            incoming = self.connection.decoder.incoming
            if incoming is not None and incoming.header.get("id") == transfer_id:
                self.connection.decoder.discard()
            with suppress(PeerLost):
                self.connection.send({"op": "cancel", "id": transfer_id})
            raise
        finally:
            self._finish(transfer_id)  # from here on its data goes nowhere

    async def write(self, ours: Cursor, region: str, theirs: Sequence[tuple[int, int]]) -> None:
        transfer_id, transfer = self._begin(Op.WRITE, ours)
        try:
            request = encode({"op": "write", "id": transfer_id, "region": region}, [pack(theirs)])
            await push(self.connection, transfer_id, ours, transfer.done.done, request)
            await transfer.done
        except asyncio.CancelledError:
            await self._stop(transfer_id, transfer)
            raise
        finally:
            self._finish(transfer_id)

    async def _stop(self, transfer_id: int, transfer: _Transfer) -> None:
        """Return when the peer has confirmed that nothing of this WRITE lands any more."""
        if transfer.done.done():
            return
        transfer.stopped = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CANCEL_S):
                self.connection.send({"op": "cancel", "id": transfer_id})
                await transfer.stopped
        except TimeoutError:
            raise _Unresponsive(f"a cancelled write is not confirmed within {CANCEL_S:g} s") from None
        except asyncio.CancelledError:
            raise _Unresponsive("a cancelled write was not waited for") from None
        except PeerLost:
            return  # `on_lost` tells both sides

    def _begin(self, op: Op, ours: Cursor) -> tuple[int, _Transfer]:
        transfer_id = next(self._ids)
        transfer = _Transfer(op, ours, asyncio.get_running_loop().create_future())
        self._transfers[transfer_id] = transfer
        return transfer_id, transfer

    def _finish(self, transfer_id: int) -> None:
        transfer = self._transfers.pop(transfer_id)
        if transfer.done.done() and not transfer.done.cancelled():
            transfer.done.exception()  # it may have come while we were leaving for another reason

    def end(self, reason: str) -> None:
        """Fail what is under way."""
        for transfer in self._transfers.values():
            for waiting in (transfer.done, transfer.stopped):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(PeerLost(f"lost {self.connection.peer_id!r} during a transfer: {reason}"))

    # --- net.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        transfer = self._transfers.get(header.get("id", 0))
        if transfer is None or transfer.op is not Op.READ or transfer.done.done():
            return nowhere(nbytes)
        if nbytes > transfer.ours.left:
            raise FrameError(f"{nbytes} bytes arrive where {transfer.ours.left} were asked for")
        return transfer.ours.take(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        transfer = self._transfers.get(frame.header["id"])
        if transfer is None:
            return  # it was given up
        done = transfer.done
        match frame.header["op"]:
            case "data" if transfer.ours.left == 0 and not done.done():
                done.set_result(None)
            case "done" if not done.done():
                done.set_result(None)
            case "fail" if not done.done():
                done.set_exception(TransferError(frame.header["reason"]))
        if transfer.stopped is not None and not transfer.stopped.done() and frame.header["op"] != "data":
            transfer.stopped.set_result(None)  # whatever it says, nothing of it moves any more

    def closed(self, connection: Connection, reason: str | None) -> None:
        if self._rails.get(connection.peer_id) is self:
            del self._rails[connection.peer_id]
        self.end(reason or "it has closed")
