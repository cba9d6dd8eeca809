"""Accepts the connections of a burst together.

uvloop accepts one connection in each turn of the event loop. In a burst, a turn also has the first work of several
requests, so the last connections would wait for a second before anything of them is read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from aiohttp import web

from net.loop.seldom import Seldom
from net.loop.tasks import spawn

log = logging.getLogger("mooncake.http")

BACKLOG = 1024
"""Connections that wait until they are accepted."""

MOST = 64
"""Connections that are accepted in one turn of the event loop."""

PAUSE_S = 1.0
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""accept() fails until something else ends; the connection stays in the backlog."""


class Accepting(web.BaseSite):
    """A site of an aiohttp runner on a listening socket, which it closes."""

    def __init__(self, runner: web.AppRunner, sock: socket.socket) -> None:
        super().__init__(runner)
        self._sock = sock
        self._begun: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._seldom = Seldom()

    @property
    def name(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._listen()

    async def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
        await super().stop()

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(MOST):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if self._seldom.now(loop.time()) is not None:
                    log.warning("no connection can be accepted: %s; next try in %g s", error.strerror, PAUSE_S)
                loop.remove_reader(self._sock)
                self._retry = loop.call_later(PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            task = spawn(self._begin(connection), "accepted connection")
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

    async def _begin(self, connection: socket.socket) -> None:
        server = self._runner.server
        if server is None:  # the runner ended meanwhile
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(server, connection)
        except OSError:  # the client has gone
            connection.close()
