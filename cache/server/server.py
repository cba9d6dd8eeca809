"""StoreServer: the serving half of the pooled store. Peers read and write blocks of this node's LocalStore.

Only small blocks pass through this class. For larger ones a reply names the arena and the slots, and the peer's
transfer engine reads or writes them. A lease, numbered by the peer, grants access to slots:

    HAS      keys -> which of them are here, and which of those must be read from SSD
    PIN      keys -> lease on those that are here, to read
    RESERVE  keys -> lease on new slots, to write         ──> COMMIT ends it
    UNPIN    ends a lease of either kind, even before its grant has arrived
    READ     keys -> the small blocks, in one message
    WRITE    small blocks -> stored, in one message
    BAD      keys of blocks that arrived damaged by READ
    USED     keys of blocks that a process of this host read without a message (cache/store/same_host.py)
    REMOVE   keys -> readers no longer find them here
    PARK     keys of blocks of a session whose turn is over, with its predicted return
    UNEVEN   keys that other homes may lack: offer them the copies of this node

Their bodies are in cache/messages.py. cache/server/lasting.py answers DURABLE, KEEP and FLUSH, cache/server/taking.py
TAKE, cache/server/lending.py LEND.

A home without room redirects writers to the next member of the ranking (bounded load) and remembers the keys, so that
it can redirect readers too. `hints` lists blocks that are here in place of another home until that home has them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cache import messages
from cache.arena import Buffer
from cache.block import KEY_BYTES, BlockKey
from cache.homes.agreement import Content
from cache.homes.heat import HotBlocks
from cache.homes.repair import Hints
from cache.messages import BlocksRead, Committed, Look, Pinned, Removed, Reserved, Taken
from cache.offer import Offer
from cache.pool.policy import PLAIN
from cache.protocol import ABSENT, ELSEWHERE, Deadlines, split_keys
from cache.recent import Recent
from cache.server.lasting import Lasting
from cache.server.leases import Leases
from cache.server.lending import Lending
from cache.server.listing import Listing
from cache.sessions.parked import PARKED_AT_ONCE, ParkedBlocks
from cache.sites.copies import ExpiringCopies
from cache.tiers.granting import Granting, contents_of, facts_of
from cache.tiers.local_store import ERASE_WAIT_S, LocalStore, Pin
from net.bodies import BodyError, Nothing, typed
from net.channel.channel import Channel
from net.errors import RemoteError
from net.loop.clock import loop_time
from net.loop.turns import Turns
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

PASSED_ON_MAX = 1 << 16  # keys
PASSED_ON_S = 600.0
ERASE_SHARE = 0.5  # of the deadline of a removal: the home answers in time while its disk does not

Handler = Callable[[str, dict[str, Any], memoryview], Awaitable[Any]]
"""Of Channel.handle."""


class StoreServer:
    """Answers messages on `channel` for `local`, which it does not own."""

    def __init__(
        self, node_id: str, channel: Channel, transfer: TransferEngine, local: LocalStore, deadlines: Deadlines
    ) -> None:
        self._local = local
        self._deadlines = deadlines
        self._leases = Leases(node_id, channel, transfer, local, deadlines)
        self.hints = Hints()
        self.hot = HotBlocks()
        self.copies = ExpiringCopies[BlockKey]()
        self.parked = ParkedBlocks[BlockKey]()
        self._to_park = Turns(1)
        self._passed_on = Recent(PASSED_ON_MAX, PASSED_ON_S)
        self._granting = Granting(local, lambda key: self._passed_on.has(loop_time(), key))
        self.uneven = self._granting.uneven
        self.lending = Lending(channel, transfer, local, self._entered, self._passed_on)
        self.settle = self.lending.settle
        for kind, handler in (
            (messages.HAS, typed(messages.Has, self._has)),
            (messages.PIN, typed(messages.Pin, self._pin)),
            (messages.UNPIN, typed(messages.Unpin, self._unpin)),
            (messages.RESERVE, typed(messages.Reserve, self._reserve)),
            (messages.COMMIT, typed(messages.Commit, self._commit)),
            (messages.READ, typed(messages.Read, self._read)),
            (messages.WRITE, typed(messages.Write, self._write)),
            (messages.BAD, typed(Nothing, self._bad)),
            (messages.USED, typed(Nothing, self._used)),
            (messages.REMOVE, typed(Nothing, self._remove)),
            (messages.PARK, typed(messages.Park, self._park)),
            (messages.UNEVEN, typed(Nothing, self._uneven)),
        ):
            channel.handle(kind, self._after_announced(handler))
        Lasting(channel, local, deadlines, self.settle)
        Listing(channel, local, self.pins, self.settle)

    def _after_announced(self, handler: Handler) -> Handler:
        """Before it answers, blocks that processes of this host have announced are here."""

        def handle(peer: str, body: dict[str, Any], data: memoryview) -> Awaitable[Any]:
            self.settle()
            return handler(peer, body, data)

        return handle

    def _entered(self, key: BlockKey) -> None:
        """A process of this host has added a named value."""
        self._granting.stored(key, repair=False)
        self.copies.own([key])

    # --- messages

    async def _has(self, peer: str, body: messages.Has, data: memoryview) -> Look:
        now, have = loop_time(), []
        leading = self.leading(now, body.leading)
        keys = split_keys(data)
        if body.contents is not None and len(body.contents.checksums) != len(keys):
            raise BodyError(f"contents of {len(body.contents.checksums)} blocks instead of {len(keys)}")
        for key, content in zip(keys, contents_of(body.contents, len(keys)), strict=True):
            readable = key not in self._local.inspection and self._granting.has(key, content)
            have.append(0 if readable else self.where(now, key))
            if leading and have[-1]:
                break
        on_ssd = self._on_ssd(keys, have)
        return Look(have, on_ssd, self._local.ssd_price()) if on_ssd else Look(have)

    def _on_ssd(self, keys: Sequence[BlockKey], have: Sequence[int]) -> list[int]:
        if self._local.ssd is None:
            return []
        answers = enumerate(zip(keys, have, strict=False))
        return [at for at, (key, answer) in answers if not answer and self._local.readable(key) == "ssd"]

    def leading(self, now: float, asked: bool) -> bool:
        """Whether blocks after the first missing one are useless. They are not if the missing one may be on another
        node."""
        return asked and not self._passed_on.any(now)

    def where(self, now: float, key: BlockKey) -> int:
        """The answer, in place of a slot, for a block that is not here."""
        return ELSEWHERE if self._passed_on.has(now, key) else ABSENT

    async def _pin(self, peer: str, body: messages.Pin, data: memoryview) -> Pinned:
        keys, leading = split_keys(data), self.leading(loop_time(), body.leading)
        self._leases.open(peer, body.lease, writes=False)
        pins = await self.pins(keys, leading)
        run, now = len(pins), loop_time()
        found = [(key, pin) for key, pin in zip(keys, pins, strict=False) if pin is not None]
        slots = [pin.slot for _, pin in found]
        place = self._leases.grant(peer, body.lease, slots, [key for key, _ in found], writes=False)
        lengths = [pin.nbytes for _, pin in found]
        return Pinned(
            place,
            [self.where(now, key) if pin is None else pin.slot for key, pin in zip(keys, pins, strict=False)],
            checksums=[pin.checksum for _, pin in found],
            tiers=[pin.tier for _, pin in found],
            lengths=lengths if any(length != place.slot_bytes for length in lengths) else (),
            more=run < len(keys) and self._local.readable(keys[run]) is not None,
            hot=self.warm(now, keys),
        )

    async def pins(self, keys: list[BlockKey], leading: bool) -> list[Pin | None]:
        """Pinning.pin_each, but it waits a moment for room to promote the first block."""
        pins = await self._local.pinning.pin_each(keys, leading)
        if pins or not self._local.count_leading(keys[:1]):
            return pins
        if await self._local.wait_for_room(self._deadlines.room_s, self._local.facts(keys[0])):
            pins = await self._local.pinning.pin_each(keys, leading)
        return pins

    def warm(self, now: float, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Count the reads; returns (position, replicas) of the blocks that other homes have too."""
        self.copies.used(now, keys)
        self.parked.used(keys)
        for key in keys:
            self.hot.read(now, key)
        replicas = self.hot.replicas
        return [(i, replicas[key]) for i, key in enumerate(keys) if key in replicas] if replicas else []

    async def _read(self, peer: str, body: messages.Read, data: memoryview) -> tuple[BlocksRead, list[Buffer]]:
        keys, leading = split_keys(data), self.leading(loop_time(), body.leading)
        ready = self._local.pinning.at_hand(keys)
        pins = await self.pins(keys, leading) if ready is None else [*ready]
        now, arena = loop_time(), self._local.arena
        found = [pin for pin in pins if pin is not None]
        answer = BlocksRead(
            [self.where(now, key) if pin is None else 0 for key, pin in zip(keys, pins, strict=False)],
            checksums=[pin.checksum for pin in found],
            lengths=[pin.nbytes for pin in found],
            tiers=[pin.tier for pin in found],
            more=len(pins) < len(keys) and self._local.readable(keys[len(pins)]) is not None,
            hot=self.warm(now, keys),
        )
        blocks: list[Buffer] = [arena.memory(pin.slot)[: pin.nbytes] for pin in found] if arena is not None else []
        if ready is None:
            self._local.pinning.unpin([pin.slot for pin in found])
        return answer, blocks  # the channel copies them before another task runs

    async def _write(self, peer: str, body: messages.Write, data: memoryview) -> Taken:
        lengths, arena = body.lengths, self._local.arena
        start = len(lengths) * KEY_BYTES
        keys = split_keys(data[:start])
        if len(keys) != len(lengths) or start + sum(lengths) != len(data):
            raise BodyError(f"{len(data)} bytes are not {len(lengths)} keys and their blocks")
        if arena is not None and lengths and max(lengths) > arena.slot_bytes:
            raise RemoteError(f"blocks of {max(lengths)} bytes, the slots have {arena.slot_bytes}", "layout")
        body.offer.check(len(keys))
        answers = await self.room(keys, body.offer)
        rows = []
        rooms = zip(keys, answers, lengths, body.checksums, strict=False)
        for at, (key, slot, length, block_checksum) in enumerate(rooms):
            if slot >= 0 and arena is not None:
                arena.memory(slot)[:length] = data[start : start + length]
                rows.append((at, key, slot, block_checksum, length))
            start += length
        for at, key, slot, block_checksum, length in reversed(rows):  # as in _commit
            answers[at] = self.stored(key, slot, (block_checksum, length), body.offer)
        return self.taken(answers, len(keys))

    async def _unpin(self, peer: str, body: messages.Unpin, data: memoryview) -> None:
        """End a lease. Blocks that the peer reports as damaged are misses until they have been inspected."""
        lease = self._leases.take(peer, body.lease)
        if lease is None:
            return
        self._leases.give_back(lease.slots, writes=lease.writes)
        if not body.bad:
            return
        if min(body.bad) < 0 or max(body.bad) >= len(lease.keys):
            raise BodyError(f"damaged blocks at {min(body.bad)} to {max(body.bad)} of {len(lease.keys)}")
        self._local.inspection.begin([lease.keys[position] for position in body.bad])

    async def _reserve(self, peer: str, body: messages.Reserve, data: memoryview) -> Reserved:
        """Reserve slots. The writer sends the blocks without room to the next member if it can (`divert`)."""
        keys = split_keys(data)
        body.offer.check(len(keys))
        self._leases.open(peer, body.lease, writes=True, offer=body.offer)
        answers = await self.room(keys, body.offer)
        granted = [(slot, key) for slot, key in zip(answers, keys, strict=False) if slot >= 0]
        slots, slot_keys = [slot for slot, _ in granted], [key for _, key in granted]
        place = self._leases.grant(peer, body.lease, slots, slot_keys, writes=True)
        return Reserved(place, answers, self.why_short(answers, len(keys)))

    def taken(self, answers: list[int], count: int) -> Taken:
        """The answer to a request to store `count` blocks, after those that got a slot are stored."""
        return Taken([min(0, answer) for answer in answers], self.why_short(answers, count))

    def why_short(self, answers: Sequence[int], count: int) -> str:
        """The trouble of the SSD tier, if fewer than `count` blocks got an answer."""
        return self._local.trouble if len(answers) < count else ""

    async def room(self, keys: list[BlockKey], offer: Offer) -> list[int]:
        """`room_now`; if the writer cannot go elsewhere, this waits for room."""
        answers = self.room_now(keys, offer)
        if answers or offer.divert or not keys:
            return answers
        first = facts_of(offer.facts, len(keys))[0] or PLAIN
        return self.room_now(keys, offer) if await self._local.wait_for_room(self._deadlines.room_s, first) else answers

    def room_now(self, keys: list[BlockKey], offer: Offer) -> list[int]:
        """Slots, or answers in place of slots, for a leading part of `keys` (cache/tiers/granting.py). With `divert`
        the writer takes the other blocks to the next member."""
        now = loop_time()
        answers = self._granting.grant(now, keys, offer)
        if offer.divert and len(answers) < len(keys) and self.lending.pause():
            for slot in answers:
                if slot >= 0:
                    self._local.reservations.abandon(slot)
            answers = self._granting.grant(now, keys, offer)  # some of the keys may be here now
        if offer.ttl_ms:
            granted = [key for key, answer in zip(keys, answers, strict=False) if answer >= 0]
            self.copies.arrived(now, granted, offer.ttl_ms / 1000)
        elif not offer.repair:
            self.copies.own(keys[: len(answers)])
        if offer.divert:
            for key in keys[len(answers) :]:
                self._passed_on.add(now, key)
        return answers

    async def _commit(self, peer: str, body: messages.Commit, data: memoryview) -> Committed:
        lease = self._leases.take(peer, body.lease)
        if lease is None:
            raise RemoteError("the reservation has expired", "expired")
        left, arena = list(lease.slots), self._local.arena
        lengths = body.lengths or [0 if arena is None else arena.slot_bytes] * len(left)
        try:
            if not lease.writes or not len(left) == len(body.checksums) == len(lengths):
                raise ValueError(f"not one checksum, and one length if any, for each of {len(left)} slots")
            contents = zip(body.checksums, lengths, strict=True)
            answers = []
            for key, slot, content in reversed(list(zip(lease.keys, lease.slots, contents, strict=True))):
                # A prompt's last block first: among equals, the block that becomes evictable first is evicted first.
                answers.append(self.stored(key, slot, content, lease.offer))
                left.pop()
        except ValueError as error:
            self._leases.give_back(left, writes=lease.writes)
            raise BodyError(str(error)) from None
        return Committed(answers[::-1])

    def stored(self, key: BlockKey, slot: int, content: Content, offer: Offer) -> int:
        """The block of a slot has arrived. Returns STORED, or the answer if another one of its key has come meanwhile
        and stays. Raises ValueError for an impossible length."""
        answer = self._granting.arrived(key, slot, content, copy=offer.contents is not None)
        self._granting.stored(key, offer.repair)
        self._passed_on.discard(key)
        if offer.owner:
            self.hints.add(key, offer.owner)
        return answer

    async def _remove(self, peer: str, body: Nothing, data: memoryview) -> Removed:
        keys = split_keys(data)
        now = loop_time()
        for key in keys:
            self.removed(now, key, self._local.content(key))
        self.hints.settled(keys)
        self.parked.used(keys)
        return Removed(await self._local.remove(keys, min(ERASE_WAIT_S, ERASE_SHARE * self._deadlines.control_s)))

    def removed(self, now: float, key: BlockKey, content: Content | None) -> None:
        """The content was removed: refuse copies of it, but not a new put."""
        self._granting.removals.add(now, key, content)

    async def _park(self, peer: str, body: messages.Park, data: memoryview) -> None:
        """Park a few blocks per turn of the loop, whatever the number of messages: sessions may be long."""
        now, times, keys = loop_time(), body.times(), split_keys(data)
        for first in range(0, len(keys), PARKED_AT_ONCE):
            await self._to_park.take()
            here = [key for key in keys[first : first + PARKED_AT_ONCE] if self._local.contains(key) is not None]
            self.parked.park(now, here, body.session, times)

    async def _uneven(self, peer: str, body: Nothing, data: memoryview) -> None:
        self.uneven.add(split_keys(data))

    async def _bad(self, peer: str, body: Nothing, data: memoryview) -> None:
        self._local.inspection.begin(split_keys(data))

    async def _used(self, peer: str, body: Nothing, data: memoryview) -> None:
        keys = split_keys(data)
        self._local.pinning.used(keys)
        self.warm(loop_time(), keys)

    # --- accounts and life

    def stats(self) -> dict[str, int]:
        """Open leases, leases that ended by their deadline, blocks kept for other homes, hot and parked blocks, copies
        whose content differed from this home's, and slots that processes of this host may fill (no announced ones)."""
        self.settle()
        return {
            "leases": len(self._leases),
            "leases_expired": self._leases.expired,
            "hints": len(self.hints),
            "hot": len(self.hot),
            "parked": len(self.parked),
            "uneven": self.uneven.seen,
            "lent": len(self.lending),
        }

    async def close(self) -> None:
        """Release everything. Close the channel and the transfer engine first, so that no peer writes here."""
        await self.lending.close()
        await self._leases.close()
