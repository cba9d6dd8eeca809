"""Stream: one TCP connection as frames in both directions, in clear or sealed with the cluster key.

The subclass, net.channel.connection, defines the meaning of frames and how a connection begins and ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import cast

from net.channel import congestion
from net.channel.sealed_stream import SealedStream
from net.channel.send_order import SendOrder
from net.channel.turns import Turns
from net.channel.wire import STAGING_MIN, Buffer, Decoder, Frame, FrameError, Header, KeyMismatch, Place, encode, head
from net.errors import PeerLost
from net.loop.polling import NEXT, REST, Polling

log = logging.getLogger("mooncake.net")

UNSENT_MAX = 256 << 20  # bytes queued by `send`; a peer that leaves more unread counts as broken
HIGH_WATER = 1 << 20  # bytes: `drain` waits above this
BURST_BYTES = 4 << 20  # received in one turn of the loop: libuv would continue while the peer fills its buffers
SILENCE_MS = 20_000  # sent data that stays unacknowledged this long breaks the connection
INT = Struct("i")
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # s, s, probes


class Stream(asyncio.BufferedProtocol):
    """`seal` is None without a cluster key. Frames may be sent from `_usable` on."""

    def __init__(self, place: Place, header_max: int, seal: SealedStream | None) -> None:
        self.peer_id = ""
        self.decoder = Decoder(place, header_max, STAGING_MIN)
        self.turns = Turns()
        self.order = SendOrder()  # data connections share one per node and link
        self.rank = 0  # of what is sent here, for `order`
        self.polling: Polling | None = None  # set by owners that need answers quickly
        self.expects: Collection[object] = ()  # requests that the peer has not answered yet; only for polling
        self.queued = 0  # bytes given to the transport so far
        self._delivered = 0
        self._progressed: Callable[[], None] | None = None  # see `watch`
        self._seal = seal
        self._transport: asyncio.Transport | None = None
        self._ended = False
        self._resumed: asyncio.Future[None] | None = None  # set while the transport asks for a pause
        self._room = 0  # bytes of the buffer that is being filled
        self._burst = 0  # bytes received without a pause

    # --- the subclass

    def _usable(self) -> None:
        """Frames can be sent."""
        raise NotImplementedError

    def _arrived(self, frame: Frame) -> None:
        """A complete frame."""
        raise NotImplementedError

    def _refuse(self, reason: str) -> None:
        """The peer is a Mooncake node without our cluster key."""
        raise NotImplementedError

    def _break(self, reason: str) -> None:
        """The connection is no longer usable."""
        raise NotImplementedError

    def release(self) -> None:
        """The connection is lost: give back its buffers. It is a part of cycles, which only a full collection frees,
        and a node without requests makes hardly any (engine/start/garbage.py)."""
        self.decoder.close()
        if self._seal is not None:
            self._seal.close()

    # --- sending

    @property
    def remote_host(self) -> str:
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    @property
    def within_host(self) -> bool:
        """Whether both ends have the same address."""
        assert self._transport is not None
        ours, theirs = (self._transport.get_extra_info(end) for end in ("sockname", "peername"))
        return bool(ours[0] == theirs[0])

    def use_congestion(self, name: str) -> None:
        """Sets the congestion control for data sent from now on (net/channel/congestion.py). Raises OSError."""
        assert self._transport is not None
        congestion.use(self._transport.get_extra_info("socket"), name)

    def delivered(self) -> int:
        """Bytes that have arrived at the peer's socket so far."""
        if self._transport is not None and not self._ended:
            with suppress(OSError, ValueError):  # it is closed
                sock = self._transport.get_extra_info("socket")
                (waiting,) = INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(INT.size)))
                self._delivered = self.queued - self.unsent() - waiting
        return self._delivered

    def unsent(self) -> int:
        """Bytes not yet passed to the socket."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def congested(self) -> bool:
        """More bytes are unsent than `drain` allows."""
        return self.unsent() > HIGH_WATER

    def send(self, header: Header, payload: Sequence[Buffer] = ()) -> None:
        """Queue one frame; the payload is copied. Raises PeerLost."""
        self._write((encode(header, payload) if payload else head(header),))
        if self.unsent() > UNSENT_MAX:
            self._break("the peer does not read")

    def send_views(self, header: Header, views: Sequence[memoryview], nbytes: int) -> None:
        """Queue one frame of `nbytes` without copying: the memory must not change until it is sent. Follow it with
        `drain`."""
        self._write((head(header, nbytes), *views))

    async def drain(self) -> None:
        """Wait until the peer keeps up again. Raises PeerLost."""
        while self._resumed is not None:
            await asyncio.shield(self._resumed)
        if self._ended:
            raise PeerLost(f"the connection to {self.peer_id} is closed")

    def _write(self, buffers: Sequence[Buffer]) -> None:
        if self._transport is None or self._ended or self._transport.is_closing():  # closing, and not reported yet
            raise PeerLost(f"the connection to {self.peer_id or 'a peer'} is closed")
        if self._seal is not None:
            buffers = self._seal.seal(buffers)
        try:
            if len(buffers) == 1:
                self.queued += len(buffers[0])
                self._transport.write(buffers[0])
            else:
                self.queued += sum(map(len, buffers))
                self._transport.writelines(buffers)
        except RuntimeError as error:  # uvloop: the handle is closed, though the transport is not closing
            raise PeerLost(f"the connection to {self.peer_id or 'a peer'} is closed: {error}") from error

    def _stop_writing(self) -> None:
        self._ended = True
        self.decoder.discard()
        self.resume_writing()

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._ended:
            self._transport.abort()
            return
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*KEEPALIVE, (socket.TCP_USER_TIMEOUT, SILENCE_MS), (socket.TCP_NODELAY, 1)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        if self._seal is None:
            self._usable()
        elif greeting := self._seal.greeting():
            self._transport.write(greeting)

    def pause_writing(self) -> None:
        if self._resumed is None and not self._ended:
            self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self.decoder.buffer() if self._seal is None else self._seal.buffer()
        self._room = len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes < self._room:
            self._burst = 0  # the socket is empty: the loop continues with other work
        else:
            self._take_breath(nbytes)
        if self._seal is None and self.decoder.continues(nbytes):
            if self.polling is not None:
                self.polling.go_on()
            if self._progressed is not None:
                self._progressed()
            return
        if self._ended:
            return
        if self.polling is not None:
            self.polling.end()
        try:
            for frame in self.decoder.received(nbytes) if self._seal is None else self._unsealed(nbytes, self._seal):
                self._arrived(frame)
                if self._ended:
                    return
        except KeyMismatch as error:
            log.warning("refused %r from %s: %s", self, self.remote_host, error)
            self._refuse(str(error))
        except FrameError as error:
            log.warning("%r from %s: %s", self, self.remote_host, error)
            self._break(str(error))
        except Exception:
            log.exception("%r: could not handle a frame", self)
            self._break("internal error")
        if self.polling is not None:
            self.await_bytes()

    def watch(self, progressed: Callable[[], None] | None) -> None:
        """Call `progressed` whenever more of a large payload has arrived; None: no longer."""
        self._progressed = progressed

    def await_bytes(self) -> None:
        """Start polling if bytes are expected: from now on, their latency matters."""
        if self.polling is None or self._ended:
            return
        if self.decoder.incoming is not None:
            self.polling.begin(REST)
        elif self.expects:
            self.polling.begin(NEXT)

    def _unsealed(self, nbytes: int, seal: SealedStream) -> Iterator[Frame]:
        was_ready = seal.ready
        yield from seal.frames(nbytes, self.decoder)
        if seal.ready and not was_ready:
            if seal.answer and self._transport is not None:
                self._transport.write(seal.answer)
            self._usable()

    def _take_breath(self, nbytes: int) -> None:
        """Pause reading after a long burst: libuv reads again after each full buffer, up to 32 times."""
        self._burst += nbytes
        if self._burst >= BURST_BYTES and self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()  # the loop handles other events before we read on
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        self._burst = 0
        if self._transport is not None and not self._ended:
            self._transport.resume_reading()
