"""The connections of the HTTP server: read deadlines, a limit on their number, and answers to other protocols. It
decides which connection is closed if there are too many.

A connection that waits for the head of a request is idle. If a new connection finds no room, an idle one is closed:
first those that never sent a request. Half-open requests therefore block no client, and /health has its own room in
addition to the busy connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from net.http.common.door import Door
from net.http.common.errors import ApiError
from net.loop.seldom import Seldom

log = logging.getLogger("mooncake.http")

HEALTH_CONNECTIONS_MAX = 64
"""Connections beyond the limit; they get answers only to /health."""

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(RequestHandler):
    """One connection. `head_s`: time in seconds for the head of a request, from its first byte; for the first request,
    from the start of the connection."""

    _manager: Server | None

    def __init__(self, manager: Server, head_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._head_s = head_s
        self._late: asyncio.TimerHandle | None = None
        self._fresh = True  # the HTTP server has read nothing yet
        self._unread = 0  # bytes of a refused request's body that have not arrived
        self._closes = False  # when they have

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._manager is not None
        self._expect()
        self._manager.rooms.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._expect_nothing()
        if self._manager is not None:
            self._manager.rooms.leave(self)
            self._manager.door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._fresh:
            data = self._behind_refused(data)
            if not data or self._refused(data):
                return
        self._fresh = False
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._expect_nothing()
        elif self._late is None and not self._request_in_progress:
            self._expect()

    def _refused(self, data: bytes) -> bool:
        """Whether the door has answered. The client may send its next request on the same connection."""
        manager, transport = self._manager, self.transport
        if manager is None or transport is None or manager.rooms.beyond(self):
            return False
        found = manager.door.refusal(self, data)
        if found is None:
            return False
        head, answer = found
        transport.write(answer)
        manager.rooms.begin(self)
        manager.rooms.end(self)
        self._unread, self._closes = head.unread, head.closes
        self._expect_nothing()
        self._expect()
        self._behind_refused(b"")
        return True

    def _behind_refused(self, data: bytes) -> bytes:
        """What follows the body of a refused request. Without its body a connection is not closed, because that would
        take the answer from the client."""
        body, self._unread = self._unread, max(0, self._unread - len(data))
        if self._closes and not self._unread and self.transport is not None:
            self.transport.close()
        return data[body:]

    def _expect(self) -> None:
        self._late = self._loop.call_later(self._head_s, self._give_up)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self._request_in_progress and not self._messages:
            self.force_close()

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Respond
    ) -> tuple[web.StreamResponse, bool]:
        manager = self._manager
        if manager is not None:
            manager.rooms.begin(self)
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            if manager is not None:
                manager.rooms.end(self)
                manager.door.leave(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers malformed HTTP, and failures outside a handler, with an error in the API's format; rarely logs."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer was already sent")
        reason = " ".join((message or "").split("\n", 1)[0].split())[:200].rstrip(":")
        if status < 500:
            text = f"this is not a valid HTTP/1.1 request: {reason}" + _remedy(reason)
            assert self._manager is not None
            self._manager.tell(f"malformed HTTP from {request.remote}: {reason}")
        else:
            text = "internal error; see the server's log"
            log.error("a request from %s failed outside its handler", request.remote, exc_info=exc)
        response = ApiError(status, text).response()
        response.headers["Server"] = "mooncake"
        response.force_close()
        return response


def _remedy(reason: str) -> str:
    return " (--max-header-bytes)" if "more than" in reason else ""


class Rooms:
    """Tracks busy connections, idle ones, and those accepted when all places were busy."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[Connection, None] = {}  # no request yet; oldest first
        self._idle: dict[Connection, None] = {}  # answered before; longest wait first
        self._busy: set[Connection] = set()
        self._beyond: set[Connection] = set()  # arrived when all places were busy

    def enter(self, connection: Connection) -> None:
        if len(self._strangers) + len(self._idle) + len(self._busy) >= self._most:
            waiting = next(iter(self._strangers or self._idle), None)
            if waiting is not None:
                self.leave(waiting)
                waiting.force_close()
            elif len(self._beyond) < HEALTH_CONNECTIONS_MAX:
                self._beyond.add(connection)
            else:
                connection.force_close()
                return
        self._strangers[connection] = None

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        self._beyond.discard(connection)

    def begin(self, connection: Connection) -> None:
        """The connection has sent a request."""
        if connection in self._strangers or connection in self._idle:
            self._strangers.pop(connection, None)
            self._idle.pop(connection, None)
            self._busy.add(connection)

    def end(self, connection: Connection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def beyond(self, connection: object) -> bool:
        """Whether the connection arrived when there was no room: only /health is answered."""
        return connection in self._beyond


class Server(web.Server):
    """Makes a Connection per connection."""

    def __init__(self, like: web.Server, rooms: Rooms, door: Door, head_s: float) -> None:
        """`like`: the server that the application makes."""
        super().__init__(
            like.request_handler,
            request_factory=like.request_factory,
            handler_cancellation=like.handler_cancellation,
            loop=like._loop,
            **like._kwargs,
        )
        self.rooms, self.door, self._head_s = rooms, door, head_s
        self._seldom = Seldom()

    def __call__(self) -> RequestHandler:
        return Connection(self, self._head_s, loop=self._loop, **self._kwargs)

    def tell(self, line: str) -> None:
        """Log the line, rate-limited."""
        more = self._seldom.now(time.monotonic())
        if more is not None:
            log.warning("%s%s", line, f" (and {more} similar ones since the last line)" if more else "")


class Runner(web.AppRunner):
    """Runs an application on a Server."""

    def __init__(self, app: web.Application, rooms: Rooms, door: Door, head_s: float, **options: Any) -> None:
        super().__init__(app, **options)
        self._rooms, self._door, self._head_s = rooms, door, head_s

    async def _make_server(self) -> Server:
        return Server(await super()._make_server(), self._rooms, self._door, self._head_s)
