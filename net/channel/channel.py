"""Channel: control messages between nodes: calls with an answer, and posts without one.

Messages to one peer arrive in the order they were sent, and their handlers start in that order. Every call has a
deadline. If the caller gives up, the handler on the other side still runs to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import orjson

from net.bodies import BodyError
from net.channel.cluster_key import ClusterKey
from net.channel.connection import Connection
from net.channel.links import Links
from net.channel.wire import PAYLOAD_MAX, Buffer, Frame, Header, allocate
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.deadlines import Deadlines
from net.loop.tasks import awaited, spawn

__all__ = ["Channel", "Handler", "PeerLost", "PeerRefused", "RemoteError"]

log = logging.getLogger("mooncake.net")

Body = dict[str, Any]
Handler = Callable[[str, Body, memoryview], Awaitable[Body | tuple[Body, Sequence[Buffer]] | None]]
"""(peer id, body, data) -> body, or (body, data), or None for {}. The handler owns the data; the channel copies the
returned value before any other task runs."""

BACKLOG_MAX = 4096  # posts waiting for one peer's connection


class Channel:
    """The node's messages. Use inside a running event loop; one per node."""

    def __init__(
        self,
        node_id: str,
        hello: dict[str, Any],
        check: Callable[[dict[str, Any]], str | None] = lambda hello: None,
        cluster_key: ClusterKey | None = None,
    ) -> None:
        """`check` gets every peer's hello before anything else is exchanged; it returns a reason to refuse the peer or
        None. With a `cluster_key`, every connection is sealed, and peers without one of its keys are refused."""
        self.node_id = node_id
        self.links = Links(node_id, hello, check, cluster_key)
        self.links.accept("control", self._opened)
        self.links.on_lost(self._fail_calls)
        self._handlers: dict[str, Handler] = {}
        self._calls: dict[int, tuple[str, asyncio.Future[Frame]]] = {}
        self._ids = count(1)
        self._backlog: dict[str, list[tuple[Header, Sequence[Buffer]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loopback = _Loopback(self)
        self._deadlines = Deadlines()
        self._place = allocate(PAYLOAD_MAX)
        self._closed = False

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen; returns the address for `connect` and `introduce`. Raises OSError if the port is in use."""
        return await self.links.start(host, port)

    def handle(self, kind: str, handler: Handler) -> None:
        """Calls and posts of `kind` start a task that runs `handler`. Its RemoteError reaches the caller; its BodyError
        becomes a RemoteError with the code bad_request; any other exception is logged here and reaches the caller as
        an internal error."""
        self._handlers[kind] = handler

    async def connect(self, address: tuple[str, int]) -> str:
        """Connect to the node that listens at `address`; returns its node id. Raises PeerRefused, PeerLost."""
        return await self.links.connect(address)

    def introduce(self, peer_id: str, address: tuple[str, int]) -> None:
        """Set the address of `peer_id`. The first message dials it."""
        self.links.introduce(peer_id, address)

    def hello_of(self, peer_id: str) -> dict[str, Any]:
        """The peer's description of itself. Raises KeyError before the first connection."""
        return self.links.hello_of(peer_id)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back with the id of a peer whose connection broke or to which posts could not be delivered. Not called
        if the peer closes in good order, or after our own close."""
        self.links.on_lost(callback)

    def on_closed(self, callback: Callable[[str], None]) -> None:
        """Call back with the id of a peer that closed in good order."""
        self.links.on_closed(callback)

    def drop(self, peer_id: str, reason: str) -> None:
        """Cut the connections to a peer that others have declared dead; `on_lost` fires if there were any."""
        self.links.drop(peer_id, reason)

    async def call(
        self, peer_id: str, kind: str, body: Body, data: Sequence[Buffer] = (), timeout_s: float = 10.0
    ) -> tuple[Body, memoryview]:
        """Ask and wait for the answer. Raises RemoteError (the handler's), PeerLost, PeerRefused, TimeoutError."""
        call_id = next(self._ids)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        deadline = self._deadlines.start(timeout_s)
        try:
            line = self._loopback if peer_id == self.node_id else self.links.control_now(peer_id)
            if line is None:
                line = await self.links.control(peer_id)
            self._calls[call_id] = (peer_id, answer)
            line.send({"t": "call", "i": call_id, "k": kind, "b": body}, data)
            frame = await answer
        except asyncio.CancelledError:
            if not deadline.was_hit():
                raise
            raise TimeoutError(f"{peer_id!r} did not answer {kind!r} within {timeout_s:g} s") from None
        finally:
            self._deadlines.end(deadline)
            self._calls.pop(call_id, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # it may have arrived together with the timeout
        return frame.header["b"], frame.data

    def ask(self, peer_id: str, kind: str, body: Body, data: Sequence[Buffer] = ()) -> asyncio.Future[Frame]:
        """`call` as a future and without a deadline, for questions to many peers: a caller that stops waiting cancels
        it. On an open connection it needs no task. The answer is in `frame.header["b"]` and `frame.data`; the future
        raises RemoteError (the handler's), PeerLost, PeerRefused."""
        line = self._loopback if peer_id == self.node_id else self.links.control_now(peer_id)
        if line is None:
            return awaited(self._ask_later(peer_id, kind, body, data))
        call_id = next(self._ids)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (peer_id, answer)
        answer.add_done_callback(partial(self._asked, call_id))
        try:
            line.send({"t": "call", "i": call_id, "k": kind, "b": body}, data)
        except PeerLost as lost:  # it broke in this turn of the loop
            answer.set_exception(lost)
        return answer

    def post(self, peer_id: str, kind: str, body: Body, data: Sequence[Buffer] = ()) -> None:
        """Send without an answer, in order with all messages to this peer. `on_lost` reports a peer that cannot be
        reached; this method does not. Raises TypeError if the body has no JSON form."""
        if self._closed:
            log.debug("closing: dropping a %r to %s", kind, peer_id)
            return
        header = {"t": "post", "k": kind, "b": body}
        line = self._loopback if peer_id == self.node_id else self.links.control_now(peer_id)
        if line is not None:
            with suppress(PeerLost):  # it broke in this turn of the loop: `on_lost` follows
                line.send(header, data)
            return
        orjson.dumps(body)  # a body without a JSON form must raise here, in the caller, not at delivery
        backlog = self._backlog.setdefault(peer_id, [])
        if len(backlog) >= BACKLOG_MAX:
            log.warning("%d messages are waiting for %s: treating it as lost", BACKLOG_MAX, peer_id)
            backlog.clear()
            asyncio.get_running_loop().call_soon(self.links.report_lost, peer_id)
            return
        backlog.append((header, [bytes(piece) for piece in data]))
        if len(backlog) == 1:
            self._spawn(self._reach(peer_id))

    def leave(self) -> None:
        """The peers are told that this node leaves: that they cut their connections is no longer logged."""
        self.links.leave()

    async def close(self) -> None:
        """Say bye to every peer, cancel the running handlers, fail the calls in flight with PeerLost. Idempotent."""
        self._closed = True
        self._deadlines.close()
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(PeerLost("this node is closing"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.links.close()

    def _opened(self, connection: Connection) -> Channel:
        with suppress(PeerLost):  # it broke during its hellos: its end calls `on_lost`
            for header, data in self._backlog.pop(connection.peer_id, ()):
                connection.send(header, data)
        return self

    # --- net.channel.connection.Receiver

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return self._place(header, nbytes)

    def frame(self, connection: Connection | _Loopback, frame: Frame) -> None:
        header = frame.header
        match header["t"]:
            case "call" | "post":
                self._spawn(self._run(connection, header, frame.data))
            case "reply":
                if (answer := self._answer(connection, header["i"])) is not None:
                    answer.set_result(frame)
            case "error":
                if (answer := self._answer(connection, header["i"])) is not None:
                    answer.set_exception(RemoteError(header["reason"], header["code"], header.get("f")))

    def closed(self, connection: Connection, reason: str | None) -> None:
        self._fail_calls(connection.peer_id)

    def _answer(self, connection: Connection | _Loopback, call_id: int) -> asyncio.Future[Frame] | None:
        peer_id, answer = self._calls.get(call_id, ("", None))
        return answer if answer is not None and not answer.done() and peer_id == connection.peer_id else None

    def _asked(self, call_id: int, answer: asyncio.Future[Frame]) -> None:
        self._calls.pop(call_id, None)

    async def _ask_later(self, peer_id: str, kind: str, body: Body, data: Sequence[Buffer]) -> Frame:
        await self.links.control(peer_id)
        return await self.ask(peer_id, kind, body, data)

    def _fail_calls(self, lost_id: str) -> None:
        """Calls that still wait for a connection are not in `_calls`: the dial ends those."""
        reason = self.links.why_lost(lost_id)
        for peer_id, answer in self._calls.values():
            if peer_id == lost_id and not answer.done():
                answer.set_exception(PeerLost(f"lost {lost_id!r}: {reason}"))

    # --- tasks

    def _spawn(self, work: Any) -> None:
        task = spawn(work, "message to or from a peer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, peer_id: str) -> None:
        """Connect to send the backlog; `_opened` sends it."""
        try:
            await self.links.control(peer_id)
        except (PeerLost, PeerRefused) as error:
            lost = self._backlog.pop(peer_id, ())
            log.info("%d messages to %s are lost: %s", len(lost), peer_id, error)
            self.links.report_lost(peer_id)

    async def _run(self, line: Connection | _Loopback, header: Header, data: memoryview) -> None:
        if line.is_cut and self.links.control_now(line.peer_id) is None:
            return  # the peer was lost in this turn of the loop: its handlers of `on_lost` have run already
        kind, call_id = header["k"], header.get("i")
        try:
            handler = self._handlers.get(kind)
            if handler is None:
                raise RemoteError(f"node {self.node_id!r} does not handle {kind!r}", "unknown kind")
            result = await handler(line.peer_id, header["b"], data)
            body, payload = result if isinstance(result, tuple) else (result or {}, ())
            if call_id is not None:
                _reply(line, {"t": "reply", "i": call_id, "b": body}, payload)
            return
        except RemoteError as error:
            reason, code, facts = error.reason, error.code, error.facts
        except BodyError as error:
            reason, code, facts = str(error), "bad_request", {}
        except Exception:  # also an answer without a JSON form: the handler's mistake
            log.exception("handler of %r failed on a message from %s", kind, line.peer_id)
            reason, code, facts = f"internal error in {kind}", "internal", {}
        if call_id is not None:
            header = {"t": "error", "i": call_id, "reason": reason, "code": code}
            _reply(line, header | {"f": facts} if facts else header)
        else:
            log.warning("refused a %r posted by %s: %s", kind, line.peer_id, reason)


def _reply(line: Connection | _Loopback, answer: Header, payload: Sequence[Buffer] = ()) -> None:
    with suppress(PeerLost):  # the caller no longer waits
        line.send(answer, payload)


class _Loopback:
    """Messages of a node to itself: the same path and the same copies, without a socket."""

    is_cut = False

    def __init__(self, channel: Channel) -> None:
        self.peer_id = channel.node_id
        self._channel = channel

    def send(self, header: Header, payload: Sequence[Buffer] = ()) -> None:
        data = b"".join(payload)
        frame = Frame(orjson.loads(orjson.dumps(header)), [memoryview(bytearray(data))] if data else [])
        asyncio.get_running_loop().call_soon(self._channel.frame, self, frame)
