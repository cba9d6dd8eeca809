"""The serving end of a data connection: answers READ with bytes of its regions, and stores the bytes of WRITE in
them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from net.channel.connection import Connection
from net.channel.wire import Frame, FrameError, Header, allocate, nowhere
from net.errors import PeerLost, TransferError
from net.loop.tasks import spawn
from net.transfer.common.memory import Region
from net.transfer.common.spans import Cursor, Run, check, unpack
from net.transfer.tcp.bulk_call import Services
from net.transfer.tcp.bulk_server import BulkServer
from net.transfer.tcp.coding import RAW_BYTES, Coding, Encode, land, place_coded
from net.transfer.tcp.pushing import at_once, push, send_frame

HEADER_RUNS_MAX = 64  # runs in the header of a request
RUNS_BYTES_MAX = 16 << 20  # of the list of runs in one request


Cut = set[tuple[str, str, int]]
"""(peer id, its instance, rail id)"""


class Served:
    """The reads and writes of one peer in this node's regions."""

    def __init__(
        self,
        connection: Connection,
        regions: Mapping[str, Region],
        everyone: set[Served],
        cut: Cut,
        services: Services,
        coding: Coding | None = None,
    ) -> None:
        """`cut`: rails that their dialers have given up: none of their bytes may be received any more."""
        self.connection = connection
        self.bulk = BulkServer(connection, services, self.cut_short, coding)
        self._coding = coding
        self.rail_id = 0  # the dialer's number of this connection
        self._cut = cut
        self._regions = regions
        self._everyone = everyone
        self._writes: dict[int, tuple[str, Cursor]] = {}
        self._reads: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._place_runs = allocate(RUNS_BYTES_MAX)
        everyone.add(self)

    def withdraw(self, name: str) -> None:
        """Refuse the rest of the running transfers of this region."""
        under_way = [key for key, (region, _) in (self._writes | self._reads).items() if region == name]
        for transfer_id in under_way:
            self._stop(transfer_id)
            self._fail(transfer_id, f"region {name!r} was unregistered")
        self.bulk.withdraw(name)

    def end(self) -> None:
        for transfer_id in [*self._writes, *self._reads]:
            self._stop(transfer_id)
        self.bulk.end()
        self._everyone.discard(self)

    def cut_short(self) -> None:
        """Receive and send nothing more."""
        self.end()
        self.connection.abort()

    # --- net.channel.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        op = header.get("op")
        if op == "bulk" or (op == "data" and self.bulk.knows(header["id"])):
            return self.bulk.place(header, nbytes)
        if op == "write" and "runs" in header:
            self._begin_write(header["id"], header, header["runs"])
        elif op != "data":
            return self._place_runs(header, nbytes)
        _, target = self._writes.get(header["id"], ("", None))
        if target is None:
            return nowhere(nbytes)
        if RAW_BYTES in header:
            return place_coded(header, nbytes)
        if nbytes > target.left:
            raise FrameError(f"{nbytes} bytes arrived, but {target.left} were announced")
        return target.take(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        transfer_id = header["id"]
        match header["op"]:
            case "bulk":
                self.bulk.asked(frame)
            case "tail":
                self.bulk.tail(header)
            case "read":
                self._begin_read(transfer_id, header, _runs(frame))
            case "write" if "runs" in header and frame.payload:  # begun by `place`
                self._landed(frame)
            case "write":
                self._begin_write(transfer_id, header, _runs(frame))
            case "data" if self.bulk.knows(transfer_id):
                self.bulk.arrived(frame)
            case "data":
                self._landed(frame)
            case "cancel":
                self._stop(transfer_id)
                self.bulk.stop(transfer_id)
                connection.send({"op": "cancelled", "id": transfer_id})
            case "rail":
                self.rail_id = transfer_id
                if self._key(transfer_id) in self._cut:
                    self.cut_short()
            case "cut":
                self._cut_off(transfer_id)
                connection.send({"op": "cut", "id": transfer_id})

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end()

    # --- rails that the dialer has given up

    def _key(self, rail_id: int) -> tuple[str, str, int]:
        return self.connection.peer_id, self.connection.instance, rail_id

    def _cut_off(self, rail_id: int) -> None:
        """Cut the rail: its unread bytes are not read any more."""
        self._cut.add(key := self._key(rail_id))
        for served in [one for one in self._everyone if one._key(one.rail_id) == key]:
            served.cut_short()

    # --- transfers

    def _cursor(self, header: Header, wanted: Sequence[Run]) -> Cursor:
        name = header["region"]
        region = self._regions.get(name)
        if region is None or region.closed:
            raise TransferError(f"region {name!r} is not registered there")
        check(wanted, name, region.nbytes)
        return Cursor(region.memory, wanted)

    def _begin_read(self, transfer_id: int, header: Header, wanted: Sequence[Run]) -> None:
        try:
            source = self._cursor(header, wanted)
        except TransferError as error:
            self._fail(transfer_id, str(error))
            return
        nbytes, peer_id = source.left, self.connection.peer_id
        encode = None if self._coding is None else self._coding.asked(peer_id, header, nbytes)
        asked = header.get("rank")
        rank = asked if type(asked) is int and asked < self.connection.rank else self.connection.rank
        if at_once(self.connection, nbytes, encode, rank):
            send_frame(self.connection, {"op": "data", "id": transfer_id}, source.take(nbytes), nbytes, encode)
            return
        task = spawn(self._answer(transfer_id, source, encode, rank), "answering a read")
        self._reads[transfer_id] = (header["region"], task)

    async def _answer(self, transfer_id: int, source: Cursor, encode: Encode | None, rank: int) -> None:
        try:
            with suppress(PeerLost):
                await push(self.connection, transfer_id, source, None, encode=encode, rank=rank)
        finally:
            self._reads.pop(transfer_id, None)

    def _begin_write(self, transfer_id: int, header: Header, wanted: Sequence[Run]) -> None:
        try:
            self._writes[transfer_id] = (header["region"], self._cursor(header, wanted))
        except TransferError as error:
            self._fail(transfer_id, str(error))

    def _landed(self, frame: Frame) -> None:
        """A complete frame of a write."""
        transfer_id = frame.header["id"]
        _, target = self._writes.get(transfer_id, ("", None))
        if target is not None and RAW_BYTES in frame.header:
            land(self._coding, self.connection.peer_id, frame, target)
        if target is not None and target.left == 0:
            del self._writes[transfer_id]
            self.connection.send({"op": "done", "id": transfer_id})

    def _stop(self, transfer_id: int) -> None:
        if self._writes.pop(transfer_id, None) is not None:
            incoming = self.connection.decoder.incoming
            if incoming is not None and incoming.header.get("id") == transfer_id:
                self.connection.decoder.discard()
        _, task = self._reads.pop(transfer_id, ("", None))
        if task is not None:
            task.cancel()

    def _fail(self, transfer_id: int, reason: str) -> None:
        with suppress(PeerLost):  # the connection is closing, and nobody has said so yet
            self.connection.send({"op": "fail", "id": transfer_id, "reason": reason})


def _runs(frame: Frame) -> Sequence[Run]:
    """Up to HEADER_RUNS_MAX runs are in the header of a request; more are its payload."""
    runs: Sequence[Run] | None = frame.header.get("runs")
    return unpack(frame.data) if runs is None else runs
