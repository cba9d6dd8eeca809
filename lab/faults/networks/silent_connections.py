"""A flood of TCP connections that never finish what they begin, opened again when the other side closes them."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

Address = tuple[str, int]

SWEEP_S = 0.1
CONNECT_S = 1.0
PER_SWEEP = 200
"""New connections per sweep: opening all in one go would measure the accept queue of the kernel."""


class SilentConnections:
    """Keeps `count` connections open to `addresses` in turn during an `async with` block.

    greeting    the only bytes that each connection sends, for example half of the head of an HTTP request
    opened      the number of connections opened so far, including those that replaced closed ones
    """

    def __init__(self, addresses: Sequence[Address], count: int, greeting: bytes = b"") -> None:
        self.addresses, self.count, self.greeting = addresses, count, greeting
        self.opened = self._tried = 0
        self._open: list[socket.socket] = []

    async def __aenter__(self) -> Self:
        allow_files(self.count + 1024)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for one in self._open:
            one.close()

    async def _run(self) -> None:
        while True:
            self._drop_closed()
            for _ in range(min(PER_SWEEP, self.count - len(self._open))):
                await self._add(self.addresses[self._tried % len(self.addresses)])
            await asyncio.sleep(SWEEP_S)

    async def _add(self, address: Address) -> None:
        self._tried += 1
        one = socket.socket()
        one.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):  # wait_for of Python 3.11 may lose the cancellation of this task
                await asyncio.get_running_loop().sock_connect(one, address)
            one.send(self.greeting)
        except OSError:  # refused, or closed at once; a timeout is an OSError too
            one.close()
        else:
            self._open.append(one)
            self.opened += 1

    def _drop_closed(self) -> None:
        living = []
        for one in self._open:
            try:
                closed = not one.recv(4096)
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            if closed:
                one.close()
            else:
                living.append(one)
        self._open = living


def allow_files(count: int) -> None:
    """Let this process open `count` files. Raises ValueError if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
