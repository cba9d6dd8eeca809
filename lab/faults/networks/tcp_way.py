"""TCP connections of this host through a process that can cut them: nobody is told, as of a network that drops all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16


class Way:
    """Carries bytes between those that connect to `port` and the server at `to`, both of this host. A context manager.

    The server may start later: a connection that finds none is closed. Nobody is told of a cut: connections stay, and
    go on when it is over. The kernel accepts one that is made during it, but the server hears of it afterwards."""

    def __init__(self, to: int) -> None:
        self._to, self._open = to, threading.Event()
        self._open.set()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def cut(self) -> None:
        """Until `heal`."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Cut during the block."""
        self.cut()
        try:
            yield
        finally:
            self.heal()

    def carries(self, data: bytes, connection: object) -> None:
        """For subclasses: called with all bytes of each direction of each connection, in order."""

    def close(self) -> None:
        """No thread and no port remains."""
        self._closed = True
        self.heal()
        with suppress(OSError):  # Linux wakes a thread in accept for this only, not for close
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # of a listener that is closed
            while True:
                near, _ = self._listener.accept()
                self._open.wait()
                if self._closed:
                    near.close()
                    return
                try:
                    far = socket.create_connection((HOST, self._to))
                except OSError:
                    near.close()
                    continue
                self._socks += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, begin: socket.socket, end: socket.socket) -> None:
        with suppress(OSError):
            while data := begin.recv(CHUNK_BYTES):
                self.carries(data, begin)
                self._open.wait()
                end.sendall(data)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
