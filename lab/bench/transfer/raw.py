"""The limits: libc memcpy in one or two threads, and blocking sockets (sendall, recv_into), in plain Python.

"memcpy-2" copies half of every call in a second thread; it splits a call of one block in two. "stream" measures like
iperf: the same sockets, but both sides use one hot buffer of 128 KiB instead of cold arenas.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from typing import Any

from lab.bench.transfer.agent import Arena, Call, timed

HEAD = struct.Struct("<BIQ")  # 0 read, 1 write; blocks; bytes of a block. Then a u64 offset per block
ACK = b"\1"
HOT = 128 << 10  # bytes

Copy = tuple[int, int, int]
"""(source address, target address, bytes)."""

Views = Callable[[Arena, int, int], list[memoryview]]
"""(arena, offset, bytes) -> the memory that is sent or received."""


def make(name: str, role: str, congestion: str) -> Any:
    if name.startswith("memcpy"):
        return Idle() if role == "owner" else Memcpy(2 if name == "memcpy-2" else 1)
    views = cold if name == "sockets" else hot
    return SocketOwner(views, congestion) if role == "owner" else SocketClient(views, congestion)


def cold(arena: Arena, offset: int, size: int) -> list[memoryview]:
    return [arena.memory[offset : offset + size]]


def hot(arena: Arena, offset: int, size: int) -> list[memoryview]:
    return [arena.memory[: min(HOT, size - at)] for at in range(0, size, HOT)]


class Idle:
    """The other process of a copy does nothing."""

    def start(self, remote: Arena) -> dict[str, Any]:
        return {}


class Memcpy:
    """Copies memory inline: this process maps both arenas. The remote arena is set before `connect`."""

    remote: Arena

    def __init__(self, threads: int) -> None:
        self._second = Second() if threads == 2 else None

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self.local = local

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        """(from, to, bytes) of each copy of a call, for both directions and per thread."""
        return [self._copies(size, ours, theirs) for ours, theirs in calls]

    def _copies(self, size: int, ours: Sequence[int], theirs: Sequence[int]) -> dict[str, list[list[Copy]]]:
        here, there = self.local.address, self.remote.address
        pairs = [(here + a, there + b, size) for a, b in zip(ours, theirs, strict=True)]
        if self._second is None:
            shares = [pairs]
        elif len(pairs) == 1:
            (a, b, _), half = pairs[0], size // 2
            shares = [[(a, b, half)], [(a + half, b + half, size - half)]]
        else:
            shares = [pairs[::2], pairs[1::2]]
        return {"read": [[(b, a, n) for a, b, n in share] for share in shares], "write": shares}

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        return timed(self._move, [copies[op] for copies in prepared], seconds)

    def _move(self, shares: list[list[Copy]]) -> None:
        if self._second is None:
            copy(shares[0])
            return
        self._second.begin(shares[1])
        copy(shares[0])
        self._second.wait()


class Second:
    """A thread that copies in parallel with the caller."""

    def __init__(self) -> None:
        self._wanted, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._share: list[Copy] = []
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, share: list[Copy]) -> None:
        self._share = share
        self._wanted.release()

    def wait(self) -> None:
        self._done.acquire()

    def _run(self) -> None:
        while self._wanted.acquire():
            copy(self._share)
            self._done.release()


def copy(share: list[Copy]) -> None:
    for source, target, nbytes in share:
        memmove(target, source, nbytes)


class SocketOwner:
    """Answers one connection from a thread."""

    def __init__(self, views: Views, congestion: str) -> None:
        self._views, self._congestion = views, congestion

    def start(self, remote: Arena) -> dict[str, Any]:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, remote), daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def _serve(self, listener: socket.socket, remote: Arena) -> None:
        sock, _ = listener.accept()
        tune(sock, self._congestion)
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

    def __init__(self, views: Views, congestion: str) -> None:
        self._views, self._congestion = views, congestion

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self._local = local
        self._sock = socket.create_connection(("127.0.0.1", info["port"]))
        tune(self._sock, self._congestion)

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        return [
            (
                (len(ours), size, struct.pack(f"<{len(theirs)}Q", *theirs)),
                [view for offset in ours for view in self._views(self._local, offset, size)],
            )
            for ours, theirs in calls
        ]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        return timed(partial(self._read if op == "read" else self._write), prepared, seconds)

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


def tune(sock: socket.socket, congestion: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill the view."""
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side has gone")
        got += count
