"""Ranks find and reach each other: addresses in a store that all can read, one stream socket between any two.

The store is torch's or another with its calls. Each rank writes where it listens; the higher rank of a pair connects.
Two ranks of one host, as their boot ids tell, use a Unix socket and exchange their segments (memfd); others use TCP. A
rank must know the random token of the listener, which stands in the store: who reads the store may join.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from net import bodies
from net.collectives.errors import RanksGone
from net.transfer.common.memory import Region
from net.transfer.common.private_directory import PrivateDirectory
from net.transfer.shm.transport import boot_id

LENGTH = struct.Struct("<I")
HELLO_BYTES = 4096
POLL_S = 0.005


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: Any) -> Any: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens."""

    boot: str  # of its host; "": it shares no memory
    path: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a socket, in both directions."""

    rank: int
    token: str = ""
    nbytes: int = 0  # of the segment whose descriptor comes with it; 0: none
    refused: str = ""


@dataclass(slots=True)
class Met:
    """A connected rank."""

    sock: socket.socket
    segment: Region | None


class Meeting:
    """One rank's listener. `own`: its segment, which ranks of this host get; None: it shares no memory."""

    def __init__(self, store: Store, rank: int, slots: int, host: str, own: Region | None) -> None:
        self._store, self._rank, self._own = store, rank, own
        self._token = secrets.token_hex(16)
        self._directory = PrivateDirectory()
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._tcp = socket.create_server((host, 0))
        path = str(self._directory.path / "rank")
        self._unix.bind(path)
        self._unix.listen(slots)
        self._address = Address(boot_id() if own else "", path, host, self._tcp.getsockname()[1], self._token)

    def meet(self, others: set[int], timeout_s: float) -> dict[int, Met]:
        """The ranks that a group begins with. Raises RanksGone naming those that did not come in time, OSError."""
        deadline = time.monotonic() + timeout_s
        self.publish()
        met: dict[int, Met] = {}
        try:
            for rank in sorted(rank for rank in others if rank < self._rank):
                met[rank] = self.reach(rank, deadline)
            while missing := others - {*met}:
                rank, found = self.accept(missing, deadline)
                met[rank] = found
        except BaseException:
            for one in met.values():
                one.sock.close()
            raise
        return met

    def publish(self, token: str = "") -> None:
        """Write where this rank listens. `token`: of its joining, for ranks that join at the same time and may read the
        address of the process whose place it takes."""
        for key in {f"rank{self._rank}", f"rank{self._rank}{token}"}:
            self._store.set(key, orjson.dumps(bodies.encode(self._address)).decode())

    def read(self, key: str, deadline: float) -> bytes | None:
        """The value that another rank has written, or will write; None at the deadline."""
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return bytes(self._store.get(key))

    def close(self) -> None:
        self._unix.close()
        self._tcp.close()
        self._directory.close()

    def reach(self, rank: int, deadline: float, token: str = "") -> Met:
        """Connect to a rank that listens, or will. `token`: as it gave to `publish`."""
        written = self.read(f"rank{rank}{token}", deadline)
        if written is None:
            raise RanksGone(f"rank {self._rank} waited in vain for rank {rank}", [rank])
        address = bodies.decode(Address, orjson.loads(written))
        near = self._own is not None and address.boot == self._address.boot != ""
        sock = None
        if near:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(address.path)
            except OSError:  # another container or user
                sock.close()
                sock = None
        try:
            if sock is None:
                sock = socket.create_connection((address.host, address.port), max(0.1, deadline - time.monotonic()))
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            send_hello(sock, self._hello(sock, address.token), self._descriptor(sock))
            hello, segment = receive_hello(sock)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise RanksGone(f"rank {self._rank} cannot reach rank {rank} ({error})", [rank]) from error
        if hello.refused or hello.rank != rank:
            sock.close()
            raise RanksGone(f"rank {rank} refused this process: {hello.refused or 'it has another number'}", [rank])
        return Met(sock, segment)

    def accept(self, missing: set[int], deadline: float) -> tuple[int, Met]:
        """The next of these ranks that connects."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                named = ", ".join(map(str, sorted(missing)))
                raise RanksGone(f"rank {self._rank} waited in vain for ranks {named}", missing)
            for listener in (self._unix, self._tcp):
                listener.settimeout(min(left, 0.01))
                with suppress(TimeoutError):
                    sock, _ = listener.accept()
                    found = self._greet(sock, missing, left)
                    if found is not None:
                        return found

    def _greet(self, sock: socket.socket, missing: set[int], left: float) -> tuple[int, Met] | None:
        """A stranger who is none of the missing ranks is refused."""
        sock.settimeout(min(left, 5.0))
        try:
            hello, segment = receive_hello(sock)
            if not hmac.compare_digest(hello.token, self._token) or hello.rank not in missing:
                send_hello(sock, Hello(self._rank, refused="it expects no such rank"), None)
                sock.close()
                return None
            send_hello(sock, self._hello(sock, ""), self._descriptor(sock))
        except (OSError, ValueError, bodies.BodyError):
            sock.close()
            return None
        return hello.rank, Met(sock, segment)

    def _descriptor(self, sock: socket.socket) -> int | None:
        return self._own.memfd if self._own is not None and sock.family == socket.AF_UNIX else None

    def _hello(self, sock: socket.socket, token: str) -> Hello:
        shares = self._own is not None and sock.family == socket.AF_UNIX
        return Hello(self._rank, token, self._own.nbytes if self._own is not None and shares else 0)


def send_hello(sock: socket.socket, hello: Hello, descriptor: int | None) -> None:
    body = orjson.dumps(bodies.encode(hello))
    message = LENGTH.pack(len(body)) + body
    if descriptor is None:
        sock.sendall(message)
    else:
        socket.send_fds(sock, [message], [descriptor])


def receive_hello(sock: socket.socket) -> tuple[Hello, Region | None]:
    """Raises OSError for a stream that ends, ValueError for a message that is no hello."""
    descriptors: list[int] = []
    if sock.family == socket.AF_UNIX:
        head, descriptors, _, _ = socket.recv_fds(sock, LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    else:
        head = exactly(sock, LENGTH.size)
    try:
        if len(head) != LENGTH.size:
            raise ConnectionError("the stream ended before the first message")
        (length,) = LENGTH.unpack(head)
        if length > HELLO_BYTES:
            raise ValueError("the first message is no hello")
        hello = bodies.decode(Hello, orjson.loads(exactly(sock, length)))
        if not descriptors:
            return hello, None
        return hello, Region.attach(f"rank{hello.rank}", descriptors.pop(), hello.nbytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        piece = sock.recv(nbytes - len(found))
        if not piece:
            raise ConnectionError("the stream ended in the first message")
        found += piece
    return found


def own_host(named: str) -> str:
    """The address of this host that reaches the host `named`; 127.0.0.1 without one."""
    if not named:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((named, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
