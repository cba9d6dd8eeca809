"""Client: the asking half of the pooled store's messages (cache/share.py answers them).

Every message has a deadline, every lease that was asked for is ended in words whatever happens, and a home that hangs
costs one deadline and not one per request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cache.block import BlockKey
from cache.policy import Facts
from cache.share import Deadlines, join_keys
from net.channel import Channel
from net.errors import RemoteError, TransferError


class Shunned(Exception):
    """A home is passed over because it was too slow a moment ago."""


HOME_ERRORS = (Shunned, ConnectionError, RemoteError, TransferError, TimeoutError)  # lost and refused: connection


@dataclass(slots=True)
class Ticket:
    """This side of a lease: its number, and whether the home may still have it."""

    number: int
    open: bool = True
    bad: list[int] = field(default_factory=list)  # positions in the lease that did not match their checksums


class Client:
    """Messages to homes over `channel`. Errors are the channel's, and Shunned."""

    def __init__(self, channel: Channel, deadlines: Deadlines) -> None:
        self._channel = channel
        self._deadlines = deadlines
        self._shunned: dict[str, float] = {}  # home -> until when
        self._numbers = count(random.getrandbits(40) << 12)  # not those of this node's earlier life

    def check(self, home: str) -> None:
        """Raises Shunned for a home that let a message time out a moment ago; membership will soon say more."""
        if asyncio.get_running_loop().time() < self._shunned.get(home, 0.0):
            raise Shunned(f"{home} did not answer in time a moment ago")

    async def count_leading(self, home: str, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` that the home has."""
        reply = await self._call(home, "store.has", {}, join_keys(keys), self._deadlines.lookup_s)
        return int(reply["leading"])

    @contextmanager
    def ticket(self, home: str) -> Iterator[Ticket]:
        """A lease to ask `home` for. Leaving ends it unless it is over by then; a home to which the connection is
        lost knows by itself. The transfers under it must be over: their slots are reused at once."""
        ticket = Ticket(next(self._numbers))
        try:
            yield ticket
        except ConnectionError:
            ticket.open = False
            raise
        finally:
            if ticket.open:
                with suppress(ConnectionError):
                    self._channel.post(home, "store.unpin", {"lease": ticket.number, "bad": ticket.bad})

    async def pin(self, home: str, keys: Sequence[BlockKey], ticket: Ticket) -> dict[str, Any]:
        """Ask to read the leading run of `keys`: slots, checksums, tiers, more, region, slot_bytes."""
        return await self._lease(home, "store.pin", keys, ticket)

    async def reserve(
        self, home: str, keys: Sequence[BlockKey], ticket: Ticket, facts: Sequence[Facts] = ()
    ) -> dict[str, Any]:
        """Ask to write `keys`, of which `facts` are known (none: nothing): slots (or PRESENT) of a leading part,
        region, slot_bytes."""
        known = [(about.position, about.cost_s, about.service_class) for about in facts]
        return await self._lease(home, "store.reserve", keys, ticket, {"facts": known})

    async def commit(self, home: str, checksums: list[int], ticket: Ticket) -> int:
        """All that was reserved is written; returns how many blocks that are."""
        body = {"lease": ticket.number, "checksums": checksums}
        reply = await self._call(home, "store.commit", body, b"", self._deadlines.control_s)
        ticket.open = False
        return int(reply["stored"])

    async def _lease(
        self, home: str, kind: str, keys: Sequence[BlockKey], ticket: Ticket, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        body = {"lease": ticket.number, **(more or {})}
        reply = await self._call(home, kind, body, join_keys(keys), self._deadlines.control_s)
        ticket.open = bool(reply["region"])
        return reply

    async def _call(self, home: str, kind: str, body: dict[str, Any], data: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            reply, _ = await self._channel.call(home, kind, body, [data], timeout_s)
        except TimeoutError:
            self._shunned[home] = asyncio.get_running_loop().time() + self._deadlines.shun_s
            raise
        return reply
