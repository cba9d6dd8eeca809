"""Calls: the asking half of the pooled store's messages (cache/server/server.py answers them).

Every message has a deadline. Every requested lease is ended by a message in all cases. A home that hangs costs one
deadline, not one per request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from cache import messages
from cache.arena import Buffer
from cache.block import BlockKey
from cache.messages import (
    BlocksRead,
    Committed,
    KeptThere,
    Look,
    MadeDurable,
    Pinned,
    Removed,
    Reserved,
    Taken,
    TakenThere,
)
from cache.offer import Contents, Offer
from cache.protocol import Deadlines, join_keys, split_keys
from net.bodies import Nothing, answered, encode
from net.channel.channel import Channel
from net.errors import RemoteError, TransferError
from net.transfer.common.transport import BULK, URGENT
from net.transfer.tcp.bulk_call import BulkCall
from net.transfer.tcp.bulk_calls import BulkCalls
from net.transfer.tcp.pushing import SMALL_FRAME_BYTES

T = TypeVar("T")


class Shunned(Exception):
    """A home is skipped because it was too slow recently."""


class TooSlow(Exception):
    """A home has not answered within the time that a caller with another replica waits (cache/homes/pace.py)."""

    def __init__(self, home: str, waited_s: float) -> None:
        super().__init__(f"{home} took more than {1e3 * waited_s:.0f} ms")
        self.waited_s = waited_s


NOTHING = Nothing()
NEVER = (float("-inf"), 0.0)
SHUN_MAX_S = 30.0
SHUN_MEMORY = 2.0  # times (last shunning + deadline): a timeout within this time doubles the shunning
HOME_ERRORS = (Shunned, ConnectionError, RemoteError, TransferError, TimeoutError)  # ConnectionError: lost and refused


@dataclass(slots=True)
class Ticket:
    """This side of a lease: its number, and whether the home may still have it."""

    number: int
    open: bool = True
    bad: list[int] = field(default_factory=list)  # positions in the lease that did not match their checksums


class Calls:
    """Messages to homes over `channel` and questions with blocks over `bulk`. Raises their errors, and Shunned."""

    def __init__(self, channel: Channel, bulk: BulkCalls, deadlines: Deadlines) -> None:
        self._channel = channel
        self._bulk = bulk
        self._deadlines = deadlines
        self._shunned: dict[str, tuple[float, float]] = {}  # home -> end of the shunning, and its length in seconds
        self._numbers = count(random.getrandbits(40) << 12)  # differ from those before a restart of this node

    def check(self, home: str) -> None:
        """Raises Shunned for a home that recently let a message time out; membership will soon know whether it is
        alive."""
        if self._shunned and asyncio.get_running_loop().time() < self._shunned.get(home, NEVER)[0]:
            raise Shunned(f"{home} recently failed to answer in time")

    async def has(
        self,
        home: str,
        keys: Sequence[BlockKey],
        *,
        leading: bool,
        patience_s: float | None = None,
        contents: Contents | None = None,
    ) -> Look:
        """Which of `keys` the home has, with this content if `contents` are given; `leading`: up to the first missing
        one. Every method that takes `patience_s` also raises TooSlow."""
        body, data = messages.Has(leading, contents), [join_keys(keys)]
        answer, _ = await self._exchange(home, messages.HAS, body, data, self._deadlines.lookup_s, patience_s)
        return answered(Look, answer).check(len(keys), leading)

    async def remove(self, home: str, keys: Sequence[BlockKey]) -> int:
        """Remove `keys`; returns how many of them the home had."""
        return (await self._call(Removed, home, messages.REMOVE, NOTHING, keys, self._deadlines.control_s)).removed

    async def durable(self, home: str, keys: Sequence[BlockKey]) -> tuple[list[bool], str]:
        """Waits until all of `keys` are synced on the home's SSD or the time is up; returns which are, and why others
        are not."""
        wait_s = self._deadlines.durable_s
        made = await self._call(MadeDurable, home, messages.DURABLE, messages.MakeDurable(wait_s), keys, wait_s)
        return list(made.check(len(keys)).durable), made.why

    async def keep(self, home: str, keys: Sequence[BlockKey]) -> list[int]:
        """Forbid the home to evict `keys`; returns KEPT, PINS_FULL or ABSENT for each."""
        return list((await self._keep(home, keys, True)).check(len(keys)).answers)

    async def give_up(self, home: str, keys: Sequence[BlockKey]) -> int:
        """Allow the home to evict `keys` again; returns how many were protected."""
        return (await self._keep(home, keys, False)).given_up

    async def _keep(self, home: str, keys: Sequence[BlockKey], keep: bool) -> KeptThere:
        body, most_s = messages.Keep(keep), self._deadlines.control_s
        return await self._call(KeptThere, home, messages.KEEP, body, keys, most_s)

    async def flush(self, home: str) -> None:
        """Wait until all present blocks of the home are on its SSD, if it has one. RemoteError: the disk fails."""
        await self._call(Nothing, home, messages.FLUSH, NOTHING, (), self._deadlines.flush_s)

    async def list_keys(self, home: str, prefix: bytes) -> list[BlockKey]:
        """All keys of the home that begin with `prefix`."""
        keys: list[BlockKey] = []
        while True:
            body = messages.ListKeys(prefix, keys[-1] if keys else b"")
            answer, data = await self._exchange(home, messages.LIST, body, (), self._deadlines.control_s)
            keys += split_keys(data)
            if not answered(messages.Listed, answer).more:
                return keys

    async def outsets(self, home: str, keys: Sequence[BlockKey], nbytes: int) -> dict[BlockKey, bytes]:
        """The first `nbytes` of those of `keys` that the home has."""
        found: dict[BlockKey, bytes] = {}
        for first in range(0, len(keys), messages.OUTSETS_MAX):
            some = keys[first : first + messages.OUTSETS_MAX]
            body, most_s = messages.ReadOutsets(nbytes), self._deadlines.control_s
            answer, data = await self._exchange(home, messages.OUTSETS, body, [join_keys(some)], most_s)
            start = 0
            lengths = answered(messages.Outsets, answer).check(len(some), len(data)).lengths
            for key, length in zip(some, lengths, strict=True):
                if length:
                    found[key] = bytes(data[start : start + length])
                start += length
        return found

    async def stats(self, home: str) -> dict[str, Any]:
        """The home's statistics about itself."""
        body, most_s = NOTHING, self._deadlines.lookup_s
        return (await self._call(messages.StoreStats, home, messages.STATS, body, (), most_s)).stats

    @contextmanager
    def ticket(self, home: str) -> Iterator[Ticket]:
        """A lease to request from `home`. Leaving the context ends it unless it has ended already; a home that lost the
        connection ends it by itself. The transfers under it must be over, because the home reuses the slots
        immediately."""
        ticket = Ticket(next(self._numbers))
        try:
            yield ticket
        except ConnectionError:
            ticket.open = False
            raise
        finally:
            if ticket.open:
                with suppress(ConnectionError):
                    self._channel.post(home, messages.UNPIN, encode(messages.Unpin(ticket.number, ticket.bad)))

    async def pin(
        self,
        home: str,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        *,
        leading: bool = True,
        patience_s: float | None = None,
    ) -> Pinned:
        """Ask to read `keys` (the leading run of them)."""
        body, data = messages.Pin(ticket.number, leading), [join_keys(keys)]
        answer, _ = await self._exchange(home, messages.PIN, body, data, self._deadlines.control_s, patience_s)
        pinned = answered(Pinned, answer).check(len(keys))
        ticket.open = bool(pinned.place.region)
        return pinned

    async def reserve(self, home: str, keys: Sequence[BlockKey], ticket: Ticket, offer: Offer) -> Reserved:
        """Ask to write `keys`."""
        body = messages.Reserve(ticket.number, offer)
        reserved = await self._call(Reserved, home, messages.RESERVE, body, keys, self._deadlines.control_s)
        ticket.open = bool(reserved.check(len(keys)).place.region)
        return reserved

    async def read(
        self, home: str, keys: Sequence[BlockKey], *, leading: bool, patience_s: float | None = None
    ) -> tuple[BlocksRead, memoryview]:
        """Read small blocks in one message; returns their description and their bytes."""
        body, most_s = messages.Read(leading), self._deadlines.control_s
        answer, data = await self._exchange(home, messages.READ, body, [join_keys(keys)], most_s, patience_s)
        return answered(BlocksRead, answer).check(len(keys), len(data)), data

    def uneven(self, home: str, keys: Sequence[BlockKey]) -> None:
        """Tell the home that other homes lack copies of blocks that it has."""
        with suppress(ConnectionError):
            self._channel.post(home, messages.UNEVEN, {}, [join_keys(keys)])

    def used(self, home: str, keys: Sequence[BlockKey]) -> None:
        """Tell the home that this process read `keys` without a message (cache/store/same_host.py)."""
        with suppress(ConnectionError):
            self._channel.post(home, messages.USED, {}, [join_keys(keys)])

    def park(self, home: str, keys: Sequence[BlockKey], body: messages.Park) -> None:
        """Tell the home that a turn of the session that has `keys` is over."""
        with suppress(ConnectionError):
            self._channel.post(home, messages.PARK, encode(body), [join_keys(keys)])

    def report(self, home: str, keys: Sequence[BlockKey]) -> None:
        """Tell the home that these blocks did not match their checksums."""
        with suppress(ConnectionError):
            self._channel.post(home, messages.BAD, {}, [join_keys(keys)])

    async def write(self, home: str, keys: Sequence[BlockKey], blocks: Sequence[Buffer], body: messages.Write) -> Taken:
        """Store small blocks in one message."""
        data = [join_keys(keys), *blocks]
        answer, _ = await self._exchange(home, messages.WRITE, body, data, self._deadlines.control_s)
        return answered(Taken, answer).check(len(keys))

    async def take(self, home: str, body: messages.Take, count: int) -> TakenThere:
        """Ask a home on this host to copy `count` blocks from this process's memory, over a data connection if there is
        one: it answers sooner."""
        if self._bulk.reaches_same_host(home):
            call = BulkCall(messages.TAKE, encode(body), 0)
            await self.ask(home, call)
            answer = call.answer
        else:
            answer, _ = await self._exchange(home, messages.TAKE, body, (), self._deadlines.control_s)
        return answered(TakenThere, answer).check(count)

    async def lend(self, home: str) -> int:
        """Ask a home on this host to lend slots; returns the page of its loans, -1 if it lends none."""
        answer, _ = await self._exchange(home, messages.LEND, NOTHING, (), self._deadlines.control_s)
        return answered(messages.Lent, answer).page

    def filled(self, home: str) -> None:
        """Tell the home to look for blocks in its lent slots."""
        with suppress(ConnectionError):
            self._channel.post(home, messages.FILLED, {})

    async def commit(self, home: str, checksums: list[int], ticket: Ticket, lengths: Sequence[int] = ()) -> list[int]:
        """Tell the home that all reserved blocks are written. Returns an answer for each: STORED, or the reason why the
        home does not store it after all."""
        body = messages.Commit(ticket.number, checksums, lengths)
        committed = await self._call(Committed, home, messages.COMMIT, body, (), self._deadlines.control_s)
        ticket.open = False
        return list(committed.check(len(checksums)).answers)

    async def ask(self, home: str, call: BulkCall, patience_s: float | None = None, priority: int = BULK) -> None:
        """A question whose blocks travel with it or with its answer. The deadline, plus the time for the question's
        bytes, limits the wait until the answer begins; then it limits each wait for more bytes."""
        most_s = self._deadlines.control_s
        impatient = patience_s is not None and patience_s < most_s
        wait_s = patience_s if patience_s is not None and impatient else most_s
        if call.expected <= SMALL_FRAME_BYTES:
            priority = URGENT
        try:
            sent_s = call.sends / self._deadlines.slowest_bytes_per_s
            await self._bulk.ask(home, call, wait_s, wait_s + sent_s, priority)
        except TimeoutError:
            if impatient:
                raise TooSlow(home, wait_s) from None
            self._shun(home)
            raise

    async def _exchange(
        self,
        home: str,
        kind: str,
        body: Any,
        data: Sequence[Buffer],
        timeout_s: float,
        patience_s: float | None = None,
    ) -> tuple[dict[str, Any], memoryview]:
        impatient = patience_s is not None and patience_s < timeout_s
        wait_s = patience_s if patience_s is not None and impatient else timeout_s
        try:
            return await self._channel.call(home, kind, encode(body), data, wait_s)
        except TimeoutError:
            if impatient:
                raise TooSlow(home, wait_s) from None
            self._shun(home)
            raise

    def _shun(self, home: str) -> None:
        """Shun the home, twice as long as the last time if that was recent."""
        now = asyncio.get_running_loop().time()
        until, length = self._shunned.get(home, NEVER)
        if now < until:
            return  # another call met the same timeout
        recently = now - until < SHUN_MEMORY * (length + self._deadlines.control_s)
        length = min(SHUN_MAX_S, 2 * length) if recently else 0.0
        length = max(length, self._deadlines.shun_s)
        self._shunned[home] = now + length, length

    async def _call(
        self, answer: type[T], home: str, kind: str, body: Any, keys: Sequence[BlockKey], timeout_s: float
    ) -> T:
        """Send one message about `keys`."""
        return answered(answer, (await self._exchange(home, kind, body, [join_keys(keys)], timeout_s))[0])
