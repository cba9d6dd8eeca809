"""Handles nodes that fall silent. A network cut breaks no connection, so the requests of such a node would wait some
seconds until gossip declares it dead. When gossip suspects a node and it sends nothing for SILENCE_S, the acceptor
places its requests again. If the node is alive after all, its late tokens belong to an attempt that has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.front.flight import Flight
from net.channel.channel import Channel
from net.channel.wire import Buffer

SILENCE_S = 1.0


class Silent(Exception):
    """The asked node is suspected and has not answered. The acceptor can place the request again."""


class Silence:
    """The silent nodes of one acceptor. `suspects(node)`: whether gossip considers it dead or suspects it;
    `fail(flight, reason)` ends an attempt."""

    def __init__(
        self,
        channel: Channel,
        suspects: Callable[[str], bool],
        flights: Callable[[], Iterable[Flight]],
        fail: Callable[[Flight, str], None],
    ) -> None:
        self._channel, self._suspects, self._flights, self._fail = channel, suspects, flights, fail

    def suspected(self, node: str) -> None:
        """Gossip has begun to suspect the node."""
        asyncio.get_running_loop().call_later(SILENCE_S, self._check, node, time.monotonic())

    def _check(self, node: str, since: float) -> None:
        if not self._suspects(node):
            return
        reason = f"node {node} is suspected and silent"
        for flight in self._flights():
            if flight.asking is not None and flight.asking[0] == node:
                flight.unheard = reason
                flight.asking[1].cancel()
            elif node in flight.watched and flight.last_token < since:
                self._fail(flight, reason)

    async def ask(
        self, flight: Flight, node: str, kind: str, body: dict[str, Any], data: Sequence[Buffer], timeout_s: float
    ) -> dict[str, Any]:
        """Channel.call for the task that owns `flight`. It also raises Silent."""
        task = asyncio.current_task()
        assert task is not None
        flight.asking = node, task
        try:
            return (await self._channel.call(node, kind, body, data, timeout_s))[0]
        except asyncio.CancelledError:
            reason, flight.unheard = flight.unheard, ""
            if not reason or task.uncancel() > 0:  # the client disconnected
                raise
            raise Silent(reason) from None
        finally:
            flight.asking = None
