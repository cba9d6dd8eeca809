"""FrameSocket: a TCP connection with frames of net/channel/wire.py, for threads that wait. In clear, or sealed.

One thread receives. Any thread sends; a frame that the socket does not take at once is sent on by a thread of its own
(`post`), so that the thread that computes does not wait for the network.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Self

from net.channel.keyring import Keyring
from net.channel.sealed_stream import SealedStream
from net.channel.wire import (
    HEADER_MAX,
    STAGING_MIN,
    Buffer,
    Decoder,
    Frame,
    FrameError,
    Header,
    KeyMismatch,
    Place,
    encode,
    head,
    nbytes_of,
)
from net.errors import PeerLost, PeerRefused

TIMEVAL = struct.Struct("ll")
BUFFERS_MAX = 1024  # of one sendmsg, IOV_MAX of Linux
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # s, s, probes
TOO_LATE = "the other side did not say in time who it is"
LEAST_WAIT_S = 0.001  # 0 would be without end
HELLO_MAX = 64 << 10  # bytes of a header, until `expect_long`


class FrameSocket:
    """One end. `silence_s`: receiving or sending that makes no progress for this long ends with PeerLost."""

    def __init__(self, sock: socket.socket, seal: SealedStream | None, silence_s: float) -> None:
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _timeval(silence_s))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for an end that only waits
        for option, value in (*KEEPALIVE, (socket.TCP_NODELAY, 1), (socket.TCP_USER_TIMEOUT, int(1000 * silence_s))):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._progressed: Callable[[], None] = lambda: None
        self._sock, self._seal, self._silence_s = sock, seal, silence_s
        self._until: float | None = None  # by the monotonic clock: when the other side must have said who it is
        self._decoder = Decoder(_nothing, HELLO_MAX, STAGING_MIN)
        self._early: list[Frame] = []  # came together with one that was asked for
        self._turn = threading.Condition()
        self._left: list[Buffer] = []  # of a frame that is partly out
        self._sender: threading.Thread | None = None
        self._closed = False

    @classmethod
    def dial(cls, address: tuple[str, int], ring: Keyring | None, silence_s: float) -> Self:
        """`ring`: the cluster's keys. Raises PeerLost, PeerRefused if the other side has other keys."""
        try:
            sock = socket.create_connection(address, silence_s)
        except OSError as error:
            raise PeerLost(f"cannot reach {address[0]}:{address[1]}: {error}") from None
        return cls._greeted(sock, None if ring is None else SealedStream(ring, True, os.urandom(32)), silence_s)

    @classmethod
    def accepted(
        cls, sock: socket.socket, ring: Keyring | None, silence_s: float, hello_s: float | None = None
    ) -> Self:
        """`hello_s`: receiving ends after this long, however much comes, until `await_for`. Raises PeerLost,
        PeerRefused if the other side has other keys; it has been told."""
        seal = None if ring is None else SealedStream(ring, False, os.urandom(32))
        return cls._greeted(sock, seal, silence_s, None if hello_s is None else time.monotonic() + hello_s)

    @classmethod
    def _greeted(
        cls, sock: socket.socket, seal: SealedStream | None, silence_s: float, until: float | None = None
    ) -> Self:
        try:
            made = cls(sock, seal, silence_s)
            made._until = until
            if seal is not None:
                made._exchange(seal)
        except (OSError, FrameError) as error:
            sock.close()
            raise error if isinstance(error, PeerLost | PeerRefused) else PeerLost(str(error)) from None
        return made

    def _exchange(self, seal: SealedStream) -> None:
        if greeting := seal.greeting():
            self._sock.sendall(greeting)
        while not seal.ready:
            for frame in self._take():
                if not seal.ready:  # the reason of a peer without our key, in clear
                    raise PeerRefused(str(frame.header["refused"]))
                self._early.append(frame)
        if seal.answer:
            self._sock.sendall(seal.answer)

    # --- receiving, in one thread

    def trust(self, place: Place, progressed: Callable[[], None] = lambda: None) -> None:
        """The other side has been accepted: `place` gives the memory for payloads, and headers may be long.
        `progressed` is called whenever bytes have come."""
        self._progressed = progressed
        self._decoder.place = place
        self.expect_long()
        self._decoder.widen()

    def expect_long(self) -> None:
        """Headers may be long from now on: of a side that we asked. Payloads wait for `trust`."""
        self._decoder.header_max = HEADER_MAX

    def await_for(self, silence_s: float) -> None:
        """From now on, receiving ends when nothing comes for this long; 0 = only with the connection."""
        self._silence_s, self._until = silence_s, None
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(silence_s))

    def frames(self) -> Iterator[Frame]:
        """As they come; each is handled before the next one is placed. Raises PeerLost, at the end of the connection
        too."""
        while True:
            early, self._early = self._early, []
            yield from early
            yield from self._take()

    def frame(self) -> Frame:
        """The next one, for conversations in which one side speaks at a time. Raises PeerLost, PeerRefused."""
        while not self._early:
            self._early += self._take()
        return self._early.pop(0)

    def _take(self) -> Iterator[Frame]:
        seal, decoder = self._seal, self._decoder
        buffer = decoder.buffer() if seal is None else seal.buffer()
        if self._until is not None:
            self._limit_hello(self._until)
        try:
            nbytes = self._sock.recv_into(buffer)
        except BlockingIOError:
            raise PeerLost(TOO_LATE if self._until is not None else f"nothing came for {self._silence_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from None
        if not nbytes:
            raise PeerLost("the connection was closed at the other end")
        self._progressed()
        try:
            yield from decoder.received(nbytes) if seal is None else seal.frames(nbytes, decoder)
        except KeyMismatch as error:
            with suppress(OSError):
                self._sock.sendall(encode({"refused": str(error)}))
            raise PeerRefused(str(error)) from None
        except FrameError as error:
            raise PeerLost(str(error)) from None

    def _limit_hello(self, until: float) -> None:
        """The next read ends at this time. Raises PeerLost after it."""
        left = until - time.monotonic()
        if left <= LEAST_WAIT_S:
            raise PeerLost(TOO_LATE)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(min(left, self._silence_s)))

    # --- sending, in any thread

    def send(self, header: Header, views: Sequence[memoryview] = ()) -> None:
        """Raises PeerLost."""
        with self._turn:
            while self._left and not self._closed:
                self._turn.wait()
            try:
                self._write(self._buffers(header, views), 0)
            except BlockingIOError:
                raise self._broken(f"nothing could be sent for {self._silence_s:g} s") from None
            except OSError as error:
                raise self._broken(f"the connection broke: {error}") from None

    def post(self, header: Header, views: Sequence[memoryview]) -> None:
        """Does not wait: what the socket does not take now is sent later, and the memory must not change until the
        other side has answered. A connection that is broken shows where it is received."""
        with self._turn:
            while self._left and not self._closed:
                self._turn.wait()
            rest = self._buffers(header, views)
            with suppress(OSError):
                self._write(rest, socket.MSG_DONTWAIT)
            if not rest or self._closed:
                return
            self._left = rest
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_left, name="rounds-send", daemon=True)
                self._sender.start()
            self._turn.notify_all()

    def _buffers(self, header: Header, views: Sequence[memoryview]) -> list[Buffer]:
        if self._closed:
            raise PeerLost("the connection is closed")
        buffers: list[Buffer] = [head(header, sum(map(nbytes_of, views))), *views]
        return buffers if self._seal is None else list(self._seal.seal(buffers))

    def _write(self, buffers: list[Buffer], flags: int) -> None:
        """Removes what has been sent from `buffers`. Raises OSError, BlockingIOError if there is no room."""
        while buffers:
            sent = self._sock.sendmsg(buffers[:BUFFERS_MAX], (), flags)
            while buffers and sent >= (first := nbytes_of(buffers[0])):
                sent -= first
                del buffers[0]
            if sent:
                buffers[0] = memoryview(buffers[0]).cast("B")[sent:]

    def _send_left(self) -> None:
        while True:
            with self._turn:
                while not self._left and not self._closed:
                    self._turn.wait()
                if self._closed:
                    return
                buffers = self._left
            with suppress(OSError):
                self._write(buffers, 0)  # others wait for the end of this frame
            with self._turn:
                if buffers:
                    self._broken("")
                self._left = []
                self._turn.notify_all()

    def _broken(self, why: str) -> PeerLost:
        """Part of a frame may be out: nothing else can be sent, and the thread that receives sees the end."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return PeerLost(why)

    def end(self) -> None:
        """Ends both directions: the thread that receives gets PeerLost."""
        self._closed = True
        self._broken("")  # first: a thread that sends holds the turn
        with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        """After `end`, when nobody receives any more. Idempotent."""
        self.end()
        if self._sender is not None:
            self._sender.join()
        self._sock.close()


def _timeval(seconds: float) -> bytes:
    return TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))


def _nothing(header: Header, nbytes: int) -> Sequence[memoryview]:
    raise FrameError(f"{nbytes} bytes of payload came before both sides knew each other")
