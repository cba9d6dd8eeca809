"""Binds the HTTP listening socket before any slow work, and the control port that belongs to it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class ListenError(Exception):
    """The address cannot be listened on. The message is one line and names the remedy."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes any free one. Raises ListenError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ListenError(f"--host {host} is not an address of this machine: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ListenError(_remedy(host, port, error)) from None
    return sock


CONTROL_PORT_OFFSET = 10_000


def control_port(host: str, http_port: int) -> int:
    """The control port of this HTTP port if it is free for TCP and UDP, else 0. A node that restarts with the same
    command thus keeps its address for its peers. Call it before anything binds that port."""
    port = http_port + CONTROL_PORT_OFFSET
    if not 0 < http_port <= port <= 65_535:
        return 0
    try:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            family, _, _, _, address = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind) as sock:
                if kind is socket.SOCK_STREAM:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
    except OSError:
        return 0
    return port


@contextmanager
def naming_control_port(host: str, port: int) -> Iterator[None]:
    """What fails inside to bind the control port for TCP or UDP fails with ListenError, which names the flag."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ListenError(
            f"--control-port {port} on {host}: {reason}; give another one that is free for TCP and UDP, or 0 for any"
        ) from None


def _remedy(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; give another --port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; give a --port above 1023"
    return f"cannot listen on --host {host} --port {port}: {error.strerror}"
