"""The limits: one thread of libc memcpy, and blocking sockets (sendall, recv_into), in plain Python.

"stream" is what iperf measures: the sockets again, but both sides use one hot buffer of 128 KiB instead of cold arenas.
Both have the congestion control that our connections within a host have (net/congestion.py): they are a limit.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from typing import Any

from transferbench.agent import Arena, Call, timed

HEAD = struct.Struct("<BIQ")  # 0 read, 1 write; blocks; bytes of a block. Then a u64 offset per block
ACK = b"\1"
CONGESTION = b"reno"
HOT = 128 << 10  # bytes

Views = Callable[[Arena, int, int], list[memoryview]]
"""(arena, offset, bytes) -> what is sent or received."""


def make(name: str, role: str) -> Any:
    if name == "memcpy":
        return Idle() if role == "owner" else Memcpy()
    views = cold if name == "sockets" else hot
    return SocketOwner(views) if role == "owner" else SocketClient(views)


def cold(arena: Arena, offset: int, size: int) -> list[memoryview]:
    return [arena.memory[offset : offset + size]]


def hot(arena: Arena, offset: int, size: int) -> list[memoryview]:
    return [arena.memory[: min(HOT, size - at)] for at in range(0, size, HOT)]


class Idle:
    """The other process of a copy does nothing."""

    def start(self, remote: Arena) -> dict[str, Any]:
        return {}


class Memcpy:
    """Both arenas are mapped here: memory copies, inline. The remote arena is set before `connect`."""

    remote: Arena

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self.local = local

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        here, there = self.local.address, self.remote.address
        return [(size, [(here + a, there + b) for a, b in zip(ours, theirs, strict=True)]) for ours, theirs in calls]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        took: list[float] = timed(_read if op == "read" else _write, prepared, seconds)
        return took


def _read(call: Any) -> None:
    size, pairs = call
    for here, there in pairs:
        memmove(here, there, size)


def _write(call: Any) -> None:
    size, pairs = call
    for here, there in pairs:
        memmove(there, here, size)


class SocketOwner:
    """Answers one connection from a thread."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def start(self, remote: Arena) -> dict[str, Any]:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, remote), daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def _serve(self, listener: socket.socket, remote: Arena) -> None:
        sock, _ = listener.accept()
        tune(sock)
        head = memoryview(bytearray(HEAD.size))
        while sock.recv_into(head, HEAD.size, socket.MSG_WAITALL) == HEAD.size:
            write, count, size = HEAD.unpack(head)
            packed = bytearray(8 * count)
            receive(sock, memoryview(packed))
            for offset in struct.unpack(f"<{count}Q", packed):
                for view in self._views(remote, offset, size):
                    if write:
                        receive(sock, view)
                    else:
                        sock.sendall(view)
            if write:
                sock.sendall(ACK)


class SocketClient:
    """Asks for blocks and receives them in place, or sends them and waits for one byte."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self._local = local
        self._sock = socket.create_connection(("127.0.0.1", info["port"]))
        tune(self._sock)

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        return [
            (
                (len(ours), size, struct.pack(f"<{len(theirs)}Q", *theirs)),
                [view for offset in ours for view in self._views(self._local, offset, size)],
            )
            for ours, theirs in calls
        ]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        took: list[float] = timed(partial(self._read if op == "read" else self._write), prepared, seconds)
        return took

    def _read(self, call: Any) -> None:
        (count, size, offsets), views = call
        self._sock.sendall(HEAD.pack(0, count, size) + offsets)
        for view in views:
            receive(self._sock, view)

    def _write(self, call: Any) -> None:
        (count, size, offsets), views = call
        self._sock.sendall(HEAD.pack(1, count, size) + offsets)
        for view in views:
            self._sock.sendall(view)
        if self._sock.recv(1) != ACK:
            raise ConnectionError("the owner has gone")


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill the view."""
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side has gone")
        got += count
