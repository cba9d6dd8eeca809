"""Door: where processes that answer come to a process that asks, and who else asks them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from net.transfer.common.private_directory import PrivateDirectory


class Door:
    """Listens from the constructor on. Raises OSError. `port`: 0 = any free one."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.where = spelled(self.address)
        self.nodes: tuple[str, ...] = (self.where,)
        """HOST:PORT of all that share the processes which come here, this one among them."""
        self.changed = threading.Event()
        """Set when there is something new to tell the processes; who tells them clears it."""
        self._lock = threading.Lock()  # of the folder
        self._folder: PrivateDirectory | None = None

    def share(self, others: Iterable[str]) -> None:
        """`others`: HOST:PORT of those that share the processes now."""
        nodes = tuple(sorted({self.where, *others}))
        if nodes != self.nodes:
            self.nodes = nodes
            self.changed.set()

    @property
    def folder(self) -> Path:
        """That only processes of this user can enter. Raises OSError."""
        with self._lock:
            if self._folder is None:
                self._folder = PrivateDirectory()
            return self._folder.path

    def close(self) -> None:
        """Wakes the thread that accepts. Idempotent."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self._lock:
            if self._folder is not None:
                self._folder.close()


def spelled(address: tuple[Any, ...]) -> str:
    """HOST:PORT of a socket's address."""
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(where: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ValueError."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{where} is not HOST:PORT")
    host.encode("idna")  # as a look-up does: UnicodeError is a ValueError
    return host.strip("[]"), int(port)
