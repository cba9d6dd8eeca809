"""Connection: one TCP connection to a peer: it exchanges hellos, then frames in both directions.

    dialing side                  accepting side
    hello  ─────────────────────>  judge: refused, close   or   hello
    judge: refused, close  <─────
       or  welcome  ────────────>  open on both sides

The side that refuses sends its reason first, so that the other side can log it. A Receiver gets the frames. A
connection ends with a `bye` (closed in good order) or without one (broken).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from net.channel.sealed_stream import SealedStream
from net.channel.stream import Stream
from net.channel.wire import HEADER_MAX, Frame, Header, allocate, encode
from net.errors import PeerLost, PeerRefused

log = logging.getLogger("mooncake.net")

HELLO_S = 5.0  # from the TCP connection to the end of the hellos
HELLO_MAX = 64 << 10  # bytes a stranger may make us allocate


class Receiver(Protocol):
    """Takes the frames of a connection. All methods run on the event loop and do not block."""

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        """The destination of the payload of the frame that begins with `header`: a net.channel.wire.Place."""

    def frame(self, connection: Connection, frame: Frame) -> None:
        """A complete frame."""

    def closed(self, connection: Connection, reason: str | None) -> None:
        """The last call. reason: why it broke; None: the peer sent bye. Not called after our own close or abort."""


class Greeter(Protocol):
    """The node's side of every handshake."""

    def sealing(self, dialed: bool) -> SealedStream | None:
        """The sealing of a new connection; None without a cluster key."""

    def greeting(self, purpose: str) -> Header:
        """Our hello for a connection of this purpose."""

    def judge(self, connection: Connection, hello: Header) -> str | None:
        """A reason to refuse the peer that sent `hello`, or None."""

    def connected(self, connection: Connection) -> None:
        """A stranger has connected."""

    def settled(self, connection: Connection) -> None:
        """The stranger has finished its hello, or its connection has ended. May be called twice."""

    def opened(self, connection: Connection) -> Receiver:
        """The handshake is done. Returns the receiver of the frames."""

    def ended(self, connection: Connection, reason: str | None) -> None:
        """An open connection was closed (None) or broken by the other side."""

    def left(self, connection: Connection) -> None:
        """We closed or aborted it ourselves."""


class Connection(Stream):
    """One connection. `purpose` is None on the accepting side until the hello arrives."""

    def __init__(self, greeter: Greeter, everyone: set[Connection], purpose: str | None = None) -> None:
        self.dialed = purpose is not None
        super().__init__(allocate(0), HELLO_MAX, greeter.sealing(self.dialed))
        self.purpose = purpose or ""
        self.instance = ""  # of the peer's process: a different one means that the peer has restarted
        self.hello: dict[str, Any] = {}  # the peer's description of itself
        self.peer_address: tuple[str, int] | None = None  # where the peer listens
        self.is_open = False
        self.is_cut = False  # it ended without a bye
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # it may have no awaiter
        self.gone: asyncio.Future[None] = loop.create_future()
        self._greeter = greeter
        self._everyone = everyone
        self._receiver: Receiver | None = None
        self._late = loop.call_later(HELLO_S, self._break, f"no hello within {HELLO_S:g} s")

    def __repr__(self) -> str:
        return f"Connection({self.purpose or 'new'} {'to' if self.dialed else 'from'} {self.peer_id or '?'})"

    # --- ending

    def close(self) -> None:
        """Close in good order: all queued frames are sent, then a bye."""
        if self.is_open and not self._ended:
            with suppress(PeerLost):
                self.send({"bye": True})
        self._end()
        self._greeter.left(self)
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately; nothing more is sent or handled."""
        self._cut()
        self._greeter.left(self)

    def crowded_out(self) -> None:
        """Break this connection: too many wait for a hello, and this one has waited longest."""
        self._break("too many connections without a hello")

    def _cut(self) -> None:
        self.is_cut = True
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def _break(self, reason: str) -> None:
        """The connection is unusable: notify its receiver if it was open."""
        if self._ended:
            return
        opened, receiver = self.is_open, self._receiver
        self._cut()
        if not self.ready.done():
            self.ready.set_exception(PeerLost(reason))
        if opened:
            self._tell(receiver, reason)
        elif not self.dialed:
            log.debug("%r: %s", self, reason)

    def _tell(self, receiver: Receiver | None, reason: str | None) -> None:
        if receiver is not None:
            receiver.closed(self, reason)
        self._greeter.ended(self, reason)

    def _end(self) -> None:
        self._stop_writing()
        self._greeter.settled(self)
        self.is_open = False
        self._late.cancel()
        self._receiver = None

    def _transport_or_raise(self) -> asyncio.Transport:
        if self._transport is None:
            raise PeerLost(f"the connection to {self.peer_id or 'a peer'} is closed")
        return self._transport

    # --- net.channel.stream.Stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._everyone.add(self)
        super().connection_made(transport)
        if not self.dialed:
            self._greeter.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._break(str(error) if error else "the peer closed the connection without a bye")
        self._transport = None
        self.release()
        self._everyone.discard(self)
        if not self.gone.done():
            self.gone.set_result(None)

    def _usable(self) -> None:
        if self.dialed:
            self.send(self._greeter.greeting(self.purpose))

    def _refuse(self, reason: str) -> None:
        """Sends the reason in clear, because the peer could not read a sealed one."""
        if not self.dialed:
            self._transport_or_raise().write(encode({"refused": reason, "instance": ""}))
            self._end()
            self._transport_or_raise().close()
        self._refuse_ready(reason)

    def _arrived(self, frame: Frame) -> None:
        receiver = self._receiver
        if receiver is None:
            self._greet(frame)
        elif "bye" not in frame.header:
            receiver.frame(self, frame)
        else:
            self._end()
            self._transport_or_raise().close()
            self._tell(receiver, None)

    # --- hellos

    def _greet(self, frame: Frame) -> None:
        header = frame.header
        if "refused" in header:
            self.instance = str(header.get("instance", ""))
            self._refuse_ready(str(header["refused"]))
        elif self.peer_id:
            self._open()  # the welcome
        else:
            reason = self._greeter.judge(self, header)
            if reason is not None:
                self.send({"refused": reason, "instance": self._greeter.greeting(self.purpose)["instance"]})
                log.info("refused %s at %s: %s", self.peer_id or "a stranger", self.remote_host, reason)
                self._refuse_ready(reason)
            elif self.dialed:
                self.send({"welcome": True})
                self._open()
            else:
                self.send(self._greeter.greeting(self.purpose))

    def _refuse_ready(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(PeerRefused(reason))
        self.close()

    def _open(self) -> None:
        self._late.cancel()
        self._greeter.settled(self)
        self.is_open = True
        receiver = self._receiver = self._greeter.opened(self)
        self.decoder.header_max = HEADER_MAX
        self.decoder.widen()
        self.decoder.place = partial(receiver.place, self)
        if not self.ready.done():
            self.ready.set_result(None)
