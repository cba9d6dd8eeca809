"""Calls: the asking half of the pooled store's messages (cache/server/server.py answers them).

Every message has a deadline, every lease that was asked for is ended in words whatever happens, and a home that hangs
costs one deadline and not one per request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cache.arena import Buffer
from cache.block import BlockKey
from cache.protocol import Deadlines, Keep, KeptThere, Look, MadeDurable, MakeDurable, join_keys
from net.bodies import answered, encode
from net.channel.channel import Channel
from net.errors import RemoteError, TransferError
from net.transfer.common.transport import BULK, URGENT
from net.transfer.tcp.bulk_call import BulkCall
from net.transfer.tcp.bulk_calls import BulkCalls
from net.transfer.tcp.pushing import SMALL_FRAME_BYTES


class Shunned(Exception):
    """A home is passed over because it was too slow a moment ago."""


class TooSlow(Exception):
    """A home has not answered within the patience that a caller with another replica has (cache/homes/pace.py)."""

    def __init__(self, home: str, waited_s: float) -> None:
        super().__init__(f"{home} took more than {1e3 * waited_s:.0f} ms")
        self.waited_s = waited_s


NEVER = (float("-inf"), 0.0)
SHUN_MAX_S = 30.0
SHUN_MEMORY = 2.0  # times what the last one cost: a home that hangs longer than that is asked ever more seldom
HOME_ERRORS = (Shunned, ConnectionError, RemoteError, TransferError, TimeoutError)  # lost and refused: connection


@dataclass(slots=True)
class Ticket:
    """This side of a lease: its number, and whether the home may still have it."""

    number: int
    open: bool = True
    bad: list[int] = field(default_factory=list)  # positions in the lease that did not match their checksums


class Calls:
    """Messages to homes over `channel` and questions with blocks over `bulk`. Errors are theirs, and Shunned."""

    def __init__(self, channel: Channel, bulk: BulkCalls, deadlines: Deadlines) -> None:
        self._channel = channel
        self._bulk = bulk
        self._deadlines = deadlines
        self._shunned: dict[str, tuple[float, float]] = {}  # home -> until when, and for how long that was
        self._numbers = count(random.getrandbits(40) << 12)  # not those of this node's earlier life

    def check(self, home: str) -> None:
        """Raises Shunned for a home that let a message time out a moment ago; membership will soon say more."""
        if self._shunned and asyncio.get_running_loop().time() < self._shunned.get(home, NEVER)[0]:
            raise Shunned(f"{home} recently failed to answer in time")

    async def has(
        self,
        home: str,
        keys: Sequence[BlockKey],
        *,
        leading: bool,
        patience_s: float | None = None,
        contents: Sequence[tuple[int, int]] = (),
    ) -> Look:
        """What the home has of `keys`, with this content if `contents` are given; `leading`: up to the first that it
        has not. Raises TooSlow, too, as all that take `patience_s` do."""
        body: dict[str, Any] = {"leading": leading}
        if contents:
            body["contents"] = contents
        most = self._deadlines.lookup_s
        reply, _ = await self._exchange(home, "store.has", body, [join_keys(keys)], most, patience_s)
        return Look.of(reply)

    async def remove(self, home: str, keys: Sequence[BlockKey]) -> int:
        """How many the home had."""
        reply = await self._call(home, "store.remove", {}, join_keys(keys), self._deadlines.control_s)
        return int(reply["removed"])

    async def durable(self, home: str, keys: Sequence[BlockKey]) -> tuple[list[bool], str]:
        """Which of `keys` are on the home's SSD and synced there, as soon as all are or the time is up; why not."""
        wait_s = self._deadlines.durable_s
        reply = await self._call(home, "store.durable", encode(MakeDurable(wait_s)), join_keys(keys), wait_s)
        made = answered(MadeDurable, reply)
        return list(made.durable), made.why

    async def keep(self, home: str, keys: Sequence[BlockKey]) -> list[int]:
        """Never evict these there: KEPT, PINS_FULL or ABSENT for each."""
        return list((await self._keep(home, keys, True)).answers)

    async def give_up(self, home: str, keys: Sequence[BlockKey]) -> int:
        """They may be evicted again; how many could not before."""
        return (await self._keep(home, keys, False)).given_up

    async def _keep(self, home: str, keys: Sequence[BlockKey], keep: bool) -> KeptThere:
        reply = await self._call(home, "store.keep", encode(Keep(keep)), join_keys(keys), self._deadlines.control_s)
        return answered(KeptThere, reply)

    async def flush(self, home: str) -> None:
        """Until what the home has now is on its SSD, if it has one. RemoteError: the disk does not take it."""
        await self._call(home, "store.flush", {}, b"", self._deadlines.flush_s)

    async def stats(self, home: str) -> dict[str, Any]:
        """What the home says of itself."""
        return await self._call(home, "store.stats", {}, b"", self._deadlines.lookup_s)

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

    async def pin(
        self,
        home: str,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        *,
        leading: bool = True,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """Ask to read `keys` (the leading run of them): slots, checksums, tiers, more, region, slot_bytes; lengths."""
        return await self._lease(home, "store.pin", keys, ticket, {"leading": leading}, patience_s)

    async def reserve(
        self,
        home: str,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Ask to write `keys`: slots (or what is said instead) of a leading part, region, slot_bytes; trouble of the
        home's disk, if there is any. `options`: those of Share."""
        return await self._lease(home, "store.reserve", keys, ticket, options)

    async def read(
        self, home: str, keys: Sequence[BlockKey], *, leading: bool, patience_s: float | None = None
    ) -> tuple[dict[str, Any], memoryview]:
        """Small blocks in one message: slots, checksums, lengths, tiers, more, hot; and the blocks."""
        body, most = {"leading": leading}, self._deadlines.control_s
        return await self._exchange(home, "store.read", body, [join_keys(keys)], most, patience_s)

    def uneven(self, home: str, keys: Sequence[BlockKey]) -> None:
        """Other homes lack a copy of what this one has."""
        with suppress(ConnectionError):
            self._channel.post(home, "store.uneven", {}, [join_keys(keys)])

    def used(self, home: str, keys: Sequence[BlockKey]) -> None:
        """They were read without asking (cache/store/same_host.py)."""
        with suppress(ConnectionError):
            self._channel.post(home, "store.used", {}, [join_keys(keys)])

    def report(self, home: str, keys: Sequence[BlockKey]) -> None:
        """What was read did not match its checksums."""
        with suppress(ConnectionError):
            self._channel.post(home, "store.bad", {}, [join_keys(keys)])

    async def write(
        self, home: str, keys: Sequence[BlockKey], blocks: Sequence[Buffer], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Store small blocks in one message; `body` has their checksums and lengths, and the options of `reserve`.
        Returns slots, which are STORED or what is said instead, for a leading part, and trouble as `reserve` does."""
        data = [join_keys(keys), *blocks]
        reply, _ = await self._exchange(home, "store.write", body, data, self._deadlines.control_s)
        return reply

    async def commit(self, home: str, checksums: list[int], ticket: Ticket, lengths: list[int] | None = None) -> int:
        """All that was reserved is written; returns how many blocks that are."""
        body: dict[str, Any] = {"lease": ticket.number, "checksums": checksums}
        if lengths is not None:
            body["lengths"] = lengths
        reply = await self._call(home, "store.commit", body, b"", self._deadlines.control_s)
        ticket.open = False
        return int(reply["stored"])

    async def ask(self, home: str, call: BulkCall, patience_s: float | None = None) -> None:
        """A question whose blocks come with it or with its answer. The deadline is for the answer to begin, the time
        for the question's bytes added, and then for bytes to come at all."""
        most_s = self._deadlines.control_s
        impatient = patience_s is not None and patience_s < most_s
        wait_s = patience_s if patience_s is not None and impatient else most_s
        priority = URGENT if call.expected <= SMALL_FRAME_BYTES else BULK
        try:
            sent_s = call.sends / self._deadlines.slowest_bytes_per_s
            await self._bulk.ask(home, call, wait_s, wait_s + sent_s, priority)
        except TimeoutError:
            if impatient:
                raise TooSlow(home, wait_s) from None
            self._shun(home)
            raise

    async def _lease(
        self,
        home: str,
        kind: str,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        options: dict[str, Any],
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        body = {"lease": ticket.number} | {name: value for name, value in options.items() if value}
        most = self._deadlines.control_s
        reply, _ = await self._exchange(home, kind, body, [join_keys(keys)], most, patience_s)
        ticket.open = bool(reply["region"])
        return reply

    async def _exchange(
        self,
        home: str,
        kind: str,
        body: dict[str, Any],
        data: Sequence[Buffer],
        timeout_s: float,
        patience_s: float | None = None,
    ) -> tuple[dict[str, Any], memoryview]:
        impatient = patience_s is not None and patience_s < timeout_s
        wait_s = patience_s if patience_s is not None and impatient else timeout_s
        try:
            return await self._channel.call(home, kind, body, data, wait_s)
        except TimeoutError:
            if impatient:
                raise TooSlow(home, wait_s) from None
            self._shun(home)
            raise

    def _shun(self, home: str) -> None:
        """Twice as long as the last time where that was not long ago."""
        now = asyncio.get_running_loop().time()
        until, length = self._shunned.get(home, NEVER)
        if now < until:
            return  # another call has waited for the same
        recently = now - until < SHUN_MEMORY * (length + self._deadlines.control_s)
        length = min(SHUN_MAX_S, 2 * length) if recently else 0.0
        length = max(length, self._deadlines.shun_s)
        self._shunned[home] = now + length, length

    async def _call(self, home: str, kind: str, body: dict[str, Any], data: bytes, timeout_s: float) -> dict[str, Any]:
        return (await self._exchange(home, kind, body, [data], timeout_s))[0]
