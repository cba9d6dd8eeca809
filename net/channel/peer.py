"""The facts that a node has about a peer: its address, its connections, and the calls that wait for one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from net.channel.connection import Connection

Address = tuple[str, int]


@dataclass(slots=True)
class Peer:
    """This node's knowledge of another node."""

    peer_id: str
    address: Address | None = None
    instance: str = ""
    hello: dict[str, Any] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)  # every purpose, oldest first
    dialing: asyncio.Task[None] | None = None
    waiters: list[asyncio.Future[Connection]] = field(default_factory=list)
    lost_because: str = ""

    def control(self) -> Connection | None:
        """The connection on which our messages are sent."""
        return next((one for one in self.connections if one.purpose == "control"), None)

    def answer(self, connection: Connection) -> None:
        """Give the new control connection to all waiters."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(connection)
        self.waiters.clear()

    def fail(self, error: Exception) -> None:
        """There will be no control connection: all waiters raise `error`."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiters.clear()
