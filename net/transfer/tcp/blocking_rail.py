"""BlockingRail: one data connection on which a thread without an event loop asks bulk calls, one at a time.

A call that runs on the event loop of another thread costs two switches of threads in addition to its round trip. Here
the calling thread itself sends the question, and reads the answer directly into its destination. Connections that are
sealed with a cluster key are not supported.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from os import sched_yield
from typing import Self

from net.channel import congestion
from net.channel.links import Door
from net.channel.wire import Buffer, Decoder, Frame, FrameError, Header, allocate, encode, head, nbytes_of, nowhere
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.spinning import Spinning
from net.transfer.tcp.bulk_call import NOTHING, BulkCall, Source
from net.transfer.tcp.pushing import FRAME_BYTES
from net.transfer.tcp.rail import rail_ids

DIAL_S = 2.0  # connection and hellos
BUFFERS_MAX = 1024  # of one sendmsg, IOV_MAX of Linux
PIECE_BYTES = 256 << 10  # given to the socket, or taken from it, between two looks at the checksum
PURPOSE = "urgent data"  # bulk of the event loop does not wait behind these calls, nor they behind it


class BlockingRail:
    """Use it in one thread at a time. After an error other than RemoteError, close it: the answer may still come."""

    def __init__(self, sock: socket.socket, spin_s: float) -> None:
        self._sock = sock
        self._spin_s = spin_s
        self._spinning = Spinning()
        self._poll = select.poll()
        self._ids = count(1)
        self._call: BulkCall | None = None
        self._number = 0
        self._nbytes = 0  # of the answer
        self._target: Source = NOTHING
        self._decoder = Decoder(self._place)
        self._frames: Iterator[Frame] = iter(())  # received, and not handled yet
        self._hello = allocate()
        self._wait_s = DIAL_S
        self.idle_since = 0.0  # set by its owner

    @classmethod
    def dial(cls, door: Door, spin_s: float) -> Self:
        """Raises PeerLost, PeerRefused, TimeoutError."""
        try:
            sock = socket.create_connection(door.address, DIAL_S)
        except OSError as error:
            raise PeerLost(f"cannot reach {door.address[0]}:{door.address[1]}: {error}") from None
        sock.setblocking(False)
        rail = cls(sock, spin_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            within_host = sock.getsockname()[0] == sock.getpeername()[0]
            if (name := congestion.chosen("auto", within_host)) is not None:
                congestion.use(sock, name)
            rail._greet(door)
        except OSError as error:
            sock.close()
            if isinstance(error, PeerLost | PeerRefused | TimeoutError):
                raise
            raise PeerLost(f"cannot open a data connection: {error}") from None
        return rail

    def _greet(self, door: Door) -> None:
        self._send([encode(door.greeting(PURPOSE))])
        hello = self._frame().header
        if "refused" in hello:
            raise PeerRefused(str(hello["refused"]))
        if (hello.get("node"), hello.get("instance")) != (door.peer_id, door.instance):
            raise PeerLost(f"the address of {door.peer_id!r} now belongs to {hello.get('node')!r}")
        self._send([encode({"welcome": True}), encode({"op": "rail", "id": next(rail_ids)})])

    # --- calls

    def send(self, call: BulkCall, wait_s: float) -> None:
        """Send the question. `wait_s`: the longest time without progress, here and in `receive`. Raises PeerLost,
        TimeoutError."""
        self._wait_s = wait_s
        call.begin()
        data, number = call.data(), next(self._ids)
        header: Header = {"op": "bulk", "id": number, "k": call.kind, "b": call.body}
        nbytes = data.left
        if nbytes:
            header |= {"n": nbytes, "w": True} if call.is_whole else {"n": nbytes}
        self._call, self._number, self._nbytes, self._target = call, number, 0, NOTHING
        begin = head(header, min(nbytes, FRAME_BYTES))
        while True:
            frame = min(data.left, FRAME_BYTES)
            while True:
                piece = min(frame, PIECE_BYTES)
                self._send([begin, *data.take(piece)])
                call.sent(nbytes - data.left)
                begin, frame = b"", frame - piece
                if not frame:
                    break
            if not data.left:
                break
            begin = head({"op": "data", "id": number}, min(data.left, FRAME_BYTES))
        if nbytes and not call.is_whole:
            self._send([head({"op": "tail", "id": number, "b": call.tail()})])

    def receive(self) -> None:
        """Wait until the call has its answer. Raises RemoteError, PeerLost, TimeoutError."""
        call = self._call
        assert call is not None
        while True:
            header = self._frame().header
            if header.get("id") != self._number:
                raise PeerLost(f"an answer to question {header.get('id')} instead of {self._number}")
            match header.get("op"):
                case "error":
                    raise RemoteError(header["reason"], header["code"])
                case "answer" if not header["n"]:
                    call.answer = header["b"]
            if not self._target.left:
                if self._nbytes:
                    call.received(self._nbytes)
                return

    def is_over(self) -> bool:
        """Whether the connection has ended while nobody asked: then there is something to read."""
        self._poll.register(self._sock, select.POLLIN)
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Say bye. Idempotent."""
        with suppress(OSError):  # it is closed, or the peer is gone
            self._sock.send(encode({"bye": True}))
        self._sock.close()

    # --- frames

    def _place(self, header: Header, nbytes: int) -> Sequence[memoryview]:
        call = self._call
        if call is None:
            return self._hello(header, nbytes)
        if header.get("op") == "answer":
            self._nbytes = header["n"]
            try:
                self._target = call.place(header["b"], header["n"])
            except RemoteError as error:
                raise FrameError(error.reason) from None
            call.answer = header["b"]
            if self._target.left != header["n"]:
                raise FrameError(f"{header['n']} bytes arrived, but there is room for {self._target.left}")
        if header.get("id") != self._number or nbytes > self._target.left:
            return nowhere(nbytes)
        return self._target.take(nbytes)

    def _frame(self) -> Frame:
        """The next frame. Raises PeerLost, TimeoutError."""
        decoder = self._decoder
        try:
            while True:
                for frame in self._frames:
                    return frame
                nbytes = self._receive(decoder.buffer()[:PIECE_BYTES])
                if not decoder.continues(nbytes):
                    self._frames = iter(decoder.received(nbytes))
                if self._call is not None and self._nbytes:
                    self._call.received(self._nbytes - self._target.left - decoder.missing)
        except FrameError as error:
            raise PeerLost(str(error)) from None

    # --- the socket

    def _send(self, buffers: Sequence[Buffer]) -> None:
        left = sum(map(nbytes_of, buffers))
        rest = list(buffers)
        while True:
            try:
                sent = self._sock.sendmsg(rest if len(rest) <= BUFFERS_MAX else rest[:BUFFERS_MAX])
            except BlockingIOError:
                self._sleep(select.POLLOUT)
                continue
            except OSError as error:
                raise PeerLost(f"the data connection broke: {error}") from None
            left -= sent
            if not left:
                return
            while sent >= (first := nbytes_of(rest[0])):
                sent -= first
                del rest[0]
            rest[0] = memoryview(rest[0])[sent:]

    def _receive(self, target: memoryview) -> int:
        spin_until: float | None = None
        while True:
            try:
                nbytes = self._sock.recv_into(target)
            except BlockingIOError:
                if spin_until is None:
                    spin_until = time.monotonic() + self._spin_s if self._spinning.begin() else 0.0
                if spin_until:
                    if time.monotonic() < spin_until:
                        sched_yield()
                        continue
                    self._spinning.ended(in_time=False)
                    spin_until = 0.0
                self._sleep(select.POLLIN)
                continue
            except OSError as error:
                raise PeerLost(f"the data connection broke: {error}") from None
            if not nbytes:
                raise PeerLost("the peer closed the data connection")
            if spin_until:
                self._spinning.ended(in_time=time.monotonic() < spin_until)
            return nbytes

    def _sleep(self, event: int) -> None:
        self._poll.register(self._sock, event)
        if not self._poll.poll(1e3 * self._wait_s):
            raise TimeoutError(f"nothing moved for {self._wait_s:g} s")
