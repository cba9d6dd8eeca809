"""The submitting end of one data connection: its transfers and the peer's answers. See net.transfer.tcp.transport for
the messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from net.channel.connection import Connection
from net.channel.wire import Frame, FrameError, Header, nowhere
from net.errors import PeerLost, RemoteError, TransferError
from net.transfer.common.spans import Cursor, Run, pack
from net.transfer.common.transport import Op
from net.transfer.tcp.bulk_call import NOTHING, BulkCall, Source
from net.transfer.tcp.coding import ACCEPTS, RAW_BYTES, Coding, Encode, land, place_coded
from net.transfer.tcp.pushing import at_once, frame_bytes, push, send_frame
from net.transfer.tcp.server import HEADER_RUNS_MAX

CANCEL_S = 5.0  # a peer that does not confirm a cancelled WRITE within this time is given up

FLUSH_S = 0.5  # for the socket to take the queued bytes of a cancelled call

rail_ids = count(1)  # unique in this process


class RailBroken(Exception):
    """The connection broke before the transfer was done; a WRITE may still land until the peer has cut it too."""


class Unresponsive(Exception):
    """The peer does not answer a cancel or a cut."""


@dataclass(slots=True, eq=False)
class _Transfer:
    op: Op
    ours: Source
    done: asyncio.Future[None]
    stopped: asyncio.Future[None] | None = None  # set while a WRITE is being cancelled
    call: BulkCall | None = None
    nbytes: int = 0  # of the answer to `call`


class TcpRail:
    """One data connection that this node has dialed."""

    def __init__(self, connection: Connection, coding: Coding | None = None) -> None:
        self.connection = connection
        self._coding = coding
        self.rail_id = next(rail_ids)
        self.ended = False
        self._on_end: Callable[[str | None], None] = lambda reason: None
        self._ids = count(1)
        self._transfers: dict[int, _Transfer] = {}
        self._cuts: dict[int, asyncio.Future[None]] = {}
        connection.expects = self._transfers
        connection.send({"op": "rail", "id": self.rail_id})

    def on_end(self, callback: Callable[[str | None], None]) -> None:
        """Call back with the reason when the peer or the network ends the connection; None: in good order."""
        self._on_end = callback

    async def read(self, ours: Cursor, region: str, theirs: Sequence[Run], rank: int | None = None) -> None:
        """`rank`: another one than the connection's, for the peer that sends. Raises TransferError, RailBroken,
        PeerLost."""
        transfer_id, transfer = self._begin(Op.READ, ours)
        try:
            more = self._accepts() if rank is None else self._accepts() | {"rank": rank}
            self._request("read", transfer_id, region, theirs, more)
            self.connection.await_bytes()
            await transfer.done
        except asyncio.CancelledError:
            self._give_up(transfer_id)
            raise
        except PeerLost:
            await self._why(transfer)
            raise
        finally:
            self._finish(transfer_id)  # from here on, its data is discarded

    async def write(
        self, ours: Cursor, region: str, theirs: Sequence[Run], unsettled: set[int], rank: int | None = None
    ) -> None:
        """Raises TransferError, RailBroken, PeerLost, Unresponsive. Adds its id to `unsettled` if bytes may still land
        afterwards."""
        transfer_id, transfer = self._begin(Op.WRITE, ours)
        try:
            encode = self._encoder(ours.left)
            nbytes = min(ours.left, frame_bytes(encode))
            if len(theirs) <= HEADER_RUNS_MAX and at_once(self.connection, nbytes, encode, rank):
                header = {"op": "write", "id": transfer_id, "region": region, "runs": theirs}
                send_frame(self.connection, header, ours.take(nbytes), nbytes, encode)
            else:
                self._request("write", transfer_id, region, theirs)
            await push(self.connection, transfer_id, ours, transfer.done, encode=encode, rank=rank)
            self.connection.await_bytes()
            await transfer.done
        except asyncio.CancelledError:
            await self._stop(transfer_id, transfer, unsettled)
            raise
        except (RailBroken, PeerLost):
            unsettled.add(self.rail_id)
            await self._why(transfer)
            raise
        finally:
            self._finish(transfer_id)

    async def ask(self, call: BulkCall, unsettled: set[int], rank: int | None = None) -> None:
        """Raises RemoteError, RailBroken, PeerLost. Adds its id to `unsettled` if the question's bytes may still land
        afterwards; the caller may reuse their memory here in any case."""
        call.begin()
        data = call.data()
        nbytes = data.left
        transfer_id, transfer = self._begin(Op.WRITE if nbytes else Op.READ, NOTHING)
        transfer.call = call
        header: Header = {"op": "bulk", "id": transfer_id, "k": call.kind, "b": call.body}
        if not nbytes:
            header |= self._accepts()
        try:
            if nbytes and call.is_whole:
                await self._ask_with(data, header | {"n": nbytes, "w": True}, transfer, rank)
            elif nbytes:
                await self._ask_with(data, header | {"n": nbytes}, transfer, rank)
            else:
                self.connection.send(header)
            self.connection.await_bytes()
            await transfer.done
        except asyncio.CancelledError:
            self._give_up(transfer_id)
            if nbytes:
                await self._let_go()
            raise
        except (RailBroken, PeerLost):
            if nbytes:
                unsettled.add(self.rail_id)
            await self._why(transfer)
            raise
        finally:
            self._finish(transfer_id)

    async def _ask_with(self, data: Source, header: Header, transfer: _Transfer, rank: int | None) -> None:
        """Send the question's bytes, then its tail, which is computed while the first bytes are in flight."""
        assert transfer.call is not None
        whole = transfer.call.is_whole
        encode = self._encoder(data.left)
        if at_once(self.connection, data.left, encode, rank):
            send_frame(self.connection, header, data.take(data.left), header["n"], encode)
            if not whole:
                await asyncio.sleep(0)  # the loop passes them to the socket
        else:
            await push(self.connection, header["id"], data, transfer.done, header, encode, rank)
        if not whole and not transfer.done.done():
            self.connection.send({"op": "tail", "id": header["id"], "b": transfer.call.tail()})

    async def cut(self, rail_id: int) -> None:
        """Return when the peer receives nothing more on an earlier rail of ours. Raises RailBroken, PeerLost."""
        answer = self._cuts.get(rail_id)
        if answer is None:
            answer = self._cuts[rail_id] = asyncio.get_running_loop().create_future()
            with suppress(PeerLost):  # the connection is closing: its end fails `answer`
                self._send({"op": "cut", "id": rail_id})
        await asyncio.shield(answer)

    def _encoder(self, nbytes: int) -> Encode | None:
        if self._coding is None:
            return None
        peer_id = self.connection.peer_id
        return self._coding.encoder(peer_id, self._coding.ratio_to(peer_id), nbytes)

    def _accepts(self) -> Header:
        """What a request says about coded frames in its answer."""
        ratio = 0.0 if self._coding is None else self._coding.ratio_from(self.connection.peer_id)
        return {ACCEPTS: ratio} if ratio > 0.0 else {}

    def _request(
        self, op: str, transfer_id: int, region: str, theirs: Sequence[Run], more: Header | None = None
    ) -> None:
        header: Header = {"op": op, "id": transfer_id, "region": region} | (more or {})
        if len(theirs) <= HEADER_RUNS_MAX:
            header["runs"] = theirs
            self.connection.send(header)
        else:
            self.connection.send(header, [pack(theirs)])

    def _send(self, header: Header) -> None:
        if self.ended or not self.connection.is_open:
            raise RailBroken("its connection is closed")
        self.connection.send(header)

    async def _stop(self, transfer_id: int, transfer: _Transfer, unsettled: set[int]) -> None:
        """Return when the peer has confirmed that no byte of this WRITE lands any more, or the rail has broken."""
        if transfer.done.done() and not transfer.done.cancelled():  # cancelling the task also cancels `done`
            if transfer.done.exception() is not None and self.ended:
                unsettled.add(self.rail_id)
            return
        transfer.stopped = asyncio.get_running_loop().create_future()
        give_up_at = time.monotonic() + CANCEL_S
        try:
            self._send({"op": "cancel", "id": transfer_id})
            while not transfer.stopped.done() and (left := give_up_at - time.monotonic()) > 0:
                with suppress(asyncio.CancelledError):  # a second cancellation, or the deadline, changes nothing
                    await asyncio.wait([transfer.stopped], timeout=left)
            if not transfer.stopped.done():
                raise Unresponsive(f"the peer did not confirm a cancelled write within {CANCEL_S:g} s")
            transfer.stopped.result()
        except (PeerLost, RailBroken):
            unsettled.add(self.rail_id)

    def _give_up(self, transfer_id: int) -> None:
        """Discard everything that the peer still sends for this transfer."""
        incoming = self.connection.decoder.incoming
        if incoming is not None and incoming.header.get("id") == transfer_id:
            self.connection.watch(None)
            self.connection.decoder.discard()
        with suppress(PeerLost):
            self.connection.send({"op": "cancel", "id": transfer_id})

    async def _let_go(self) -> None:
        """Return when the socket has all bytes sent so far; if the peer does not read, abort the connection."""
        connection, give_up_at = self.connection, time.monotonic() + FLUSH_S
        last = connection.queued
        while connection.queued - connection.unsent() < last and not self.ended:
            if time.monotonic() > give_up_at:
                connection.abort()
                self.closed(connection, f"the peer did not read for {FLUSH_S:g} s")
                return
            with suppress(asyncio.CancelledError):  # a second cancellation changes nothing
                await asyncio.sleep(0.001)

    async def _why(self, transfer: _Transfer) -> None:
        """Sending failed because the connection has ended or is ending. Raise the transfer's error: RailBroken
        (another connection can do it) or PeerLost."""
        await transfer.done

    def _begin(self, op: Op, ours: Source) -> tuple[int, _Transfer]:
        if self.ended or not self.connection.is_open:
            raise RailBroken("its connection is closed")
        transfer_id = next(self._ids)
        transfer = _Transfer(op, ours, asyncio.get_running_loop().create_future())
        self._transfers[transfer_id] = transfer
        return transfer_id, transfer

    def _finish(self, transfer_id: int) -> None:
        self._transfers.pop(transfer_id, None)
        if not self._transfers and self.connection.polling is not None:
            self.connection.polling.stop()

    def end(self, error: Exception) -> None:
        """Fail the running transfers. Idempotent."""
        self.ended = True
        waiting = [one for transfer in self._transfers.values() for one in (transfer.done, transfer.stopped)]
        for future in (*waiting, *self._cuts.values()):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # the waiting task may be gone

    # --- net.channel.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        transfer = self._transfers.get(header.get("id", 0))
        if transfer is None or transfer.op is not Op.READ or transfer.done.done():
            return nowhere(nbytes)
        if transfer.call is not None and not self._follow(transfer, header):
            return nowhere(nbytes)
        if RAW_BYTES in header:
            return place_coded(header, nbytes)
        if self._coding is not None:
            self._coding.went_raw(connection.peer_id, nbytes)
        if nbytes > transfer.ours.left:
            raise FrameError(f"{nbytes} bytes arrived, but {transfer.ours.left} were requested")
        return transfer.ours.take(nbytes)

    def _follow(self, transfer: _Transfer, header: Header) -> bool:
        """Bytes of an answer begin to arrive, or continue; False if they were not requested."""
        call = transfer.call
        assert call is not None
        if header["op"] == "answer":
            call.answer, transfer.nbytes = header["b"], header["n"]
            try:
                transfer.ours = call.place(header["b"], header["n"])
            except RemoteError as error:
                transfer.done.set_exception(error)
                transfer.done.exception()
                return False
            if transfer.ours.left != header["n"]:
                raise FrameError(f"{header['n']} bytes arrived, but there is room for {transfer.ours.left}")
        if RAW_BYTES not in header:
            decoder = self.connection.decoder
            self.connection.watch(lambda: call.received(transfer.nbytes - transfer.ours.left - decoder.missing))
        return True

    def frame(self, connection: Connection, frame: Frame) -> None:
        op, number = frame.header["op"], frame.header["id"]
        if op == "cut":
            if (answer := self._cuts.pop(number, None)) is not None and not answer.done():
                answer.set_result(None)
            return
        transfer = self._transfers.get(number)
        if transfer is None:
            return  # the transfer was given up
        done = transfer.done
        if RAW_BYTES in frame.header and transfer.op is Op.READ and not done.done():
            land(self._coding, connection.peer_id, frame, transfer.ours)
        if transfer.call is not None and not done.done() and op in ("answer", "data"):
            self._answered(transfer, transfer.call, frame.header)
        if done.done():
            pass
        elif op == "error":
            done.set_exception(RemoteError(frame.header["reason"], frame.header["code"]))
            done.exception()
        elif op == "done" or (op == "data" and not transfer.ours.left):
            done.set_result(None)
            del self._transfers[number]  # nothing more is expected of it
        elif op == "fail":
            done.set_exception(TransferError(frame.header["reason"]))
            done.exception()  # the waiting task may end for another reason
        if transfer.stopped is not None and not transfer.stopped.done() and op != "data":
            transfer.stopped.set_result(None)  # after any of these answers, nothing moves any more

    def _answered(self, transfer: _Transfer, call: BulkCall, header: Header) -> None:
        """A complete frame of an answer."""
        self.connection.watch(None)
        if header["op"] == "answer" and not header["n"]:
            call.answer = header["b"]
        elif transfer.nbytes:
            call.received(transfer.nbytes - transfer.ours.left)
        if not transfer.ours.left:
            transfer.done.set_result(None)
            del self._transfers[header["id"]]  # nothing more is expected of it

    def closed(self, connection: Connection, reason: str | None) -> None:
        if reason is None:
            self.end(PeerLost(f"lost {connection.peer_id!r} during a transfer: it has closed"))
        else:
            self.end(RailBroken(reason))
        self._on_end(reason)
