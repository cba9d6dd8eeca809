"""Lifeline: a Unix socket between two processes of one host that carries memfds and notices.

It is open as long as either process may touch the other's memory. The kernel closes it when a process dies, after the
last of its threads has stopped: its end proves that the other side writes no more.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from net.transfer.common.private_directory import PrivateDirectory

MESSAGE_MAX = 64 << 10  # bytes

OnMessage = Callable[["Lifeline", dict[str, Any], int | None], None]


class Lifeline:
    """One end. Messages are small JSON objects (SOCK_SEQPACKET keeps them whole), each with at most one descriptor.

    `on_message` owns the descriptor that it receives. `on_end` is called once when the other side has hung up, closed
    or died, but not after our own `close`. This end stays open until `close`, because the other side may wait for that.
    Both are called by the event loop, `poll` or `finish`, never by the constructor.
    """

    def __init__(self, sock: socket.socket, on_message: OnMessage, on_end: Callable[[Lifeline], None]) -> None:
        sock.setblocking(False)
        self._on_message, self._on_end = on_message, on_end
        self.ended = False
        self._sock = sock
        self._news = select.poll()
        self._news.register(sock, select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self.poll)

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> bool:
        """Send immediately; False if the other side is gone or has left thousands of messages unread."""
        try:
            if descriptor is None:
                self._sock.send(orjson.dumps(message))
            else:
                socket.send_fds(self._sock, [orjson.dumps(message)], [descriptor])
        except OSError:
            return False
        return True

    def poll(self) -> None:
        """Handle all arrived messages now: the peer may have sent a notice here before a message on another path."""
        while not self.ended and self._news.poll(0):  # takes a third of the time of a recvmsg without data
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, MESSAGE_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.finish()
                return
            self._handle(data, descriptors[0] if descriptors else None)

    def has_news(self) -> bool:
        """Whether `poll` would find something, or nothing can arrive any more. Any thread may ask."""
        news = select.poll()
        try:
            news.register(self._sock, select.POLLIN)
        except (OSError, ValueError):  # closed
            return True
        return self.ended or bool(news.poll(0))

    def hang_up(self) -> None:
        """Tell the other side to stop and close; `on_end` follows."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._unwatch()
            self._sock.close()

    def finish(self) -> None:
        """Read no more and call `on_end`."""
        if not self.ended:
            self._unwatch()
            self._on_end(self)

    def _unwatch(self) -> None:
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._sock.fileno())

    def _handle(self, data: bytes, descriptor: int | None) -> None:
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError:
            message = None
        if isinstance(message, dict):
            self._on_message(self, message, descriptor)
            return
        if descriptor is not None:
            os.close(descriptor)
        self.hang_up()


class Listener:
    """Accepts connections for lifelines at a socket in a private temporary directory. Raises OSError if it
    cannot be created."""

    def __init__(self, on_socket: Callable[[socket.socket], None]) -> None:
        self._on_socket = on_socket
        self._directory = PrivateDirectory()
        self.path = str(self._directory.path / "shm")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loop = asyncio.get_running_loop()
        try:
            self._sock.bind(self.path)
            self._sock.listen(128)
        except OSError:
            self.close()
            raise
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._directory.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the peer has already closed it
            self._on_socket(self._sock.accept()[0])


def connect(path: str) -> socket.socket:
    """A socket for a lifeline to the listener at `path`. Raises OSError. Does not wait: a Unix socket connects
    immediately."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(path)
        return sock
    except BaseException:
        sock.close()
        raise
