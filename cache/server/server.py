"""StoreServer: the serving half of the pooled store. Peers read and write blocks of this node's LocalStore.

The bytes of all but small blocks never pass through here: a reply names the arena and the slots, and the peer's
transfer engine reads or writes them. What a peer may touch is a lease, numbered by the peer:

    store.has      keys -> which of them are here, and which of those have to be read from SSD
    store.pin      keys -> lease on those that are here, to read
    store.reserve  keys -> lease on new slots, to write         ──> store.commit ends it
    store.unpin    ends a lease of either kind, also one whose grant is still on its way
    store.read     keys -> small blocks themselves, in one message
    store.write    small blocks -> stored, in one message
    store.bad      keys of blocks that arrived damaged by store.read
    store.used     keys of blocks that a process of this host read without asking (cache/store/same_host.py)
    store.remove   keys -> nobody finds them here any more
    store.uneven   keys that other homes may lack: offer them what is here

cache/server/lasting.py answers store.durable, store.keep and store.flush.

A home without room passes writers on to the next member of the ranking (bounded load) and remembers for which keys, so
that it can pass on readers, too. Blocks that came here in place of another home are in `hints` until it has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from cache.arena import Buffer
from cache.block import KEY_BYTES, BlockKey
from cache.homes.agreement import Content
from cache.homes.heat import HotBlocks
from cache.homes.repair import Hints
from cache.pool.policy import PLAIN
from cache.protocol import ABSENT, ELSEWHERE, Deadlines, Look, integers, owner_in, split_keys
from cache.recent import Recent
from cache.server.lasting import Lasting
from cache.server.leases import Leases
from cache.tiers.granting import Granting, contents_of, facts_in
from cache.tiers.local_store import LocalStore, Pin
from net.channel.channel import Channel
from net.errors import RemoteError
from net.loop.tasks import spawn
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

PASSED_ON_MAX = 1 << 16  # keys
PASSED_ON_S = 600.0


class StoreServer:
    """Answers store.* messages on `channel` for `local`, which it does not own."""

    def __init__(
        self, node_id: str, channel: Channel, transfer: TransferEngine, local: LocalStore, deadlines: Deadlines
    ) -> None:
        self._local = local
        self._deadlines = deadlines
        self._leases = Leases(node_id, channel, transfer, local, deadlines)
        self._inspections: set[asyncio.Task[None]] = set()
        self.hints = Hints()
        self.hot = HotBlocks()
        self._passed_on = Recent(PASSED_ON_MAX, PASSED_ON_S)
        self._granting = Granting(local, lambda key: self._passed_on.has(_now(), key))
        self.uneven = self._granting.uneven
        for kind, handler in (
            ("store.has", self._has),
            ("store.pin", self._pin),
            ("store.unpin", self._unpin),
            ("store.reserve", self._reserve),
            ("store.commit", self._commit),
            ("store.read", self._read),
            ("store.write", self._write),
            ("store.bad", self._bad),
            ("store.used", self._used),
            ("store.remove", self._remove),
            ("store.uneven", self._uneven),
        ):
            channel.handle(kind, handler)
        Lasting(channel, local, deadlines)

    # --- messages

    async def _has(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """A Look; with `leading` it may end at the first key that is not here. With `contents`, one per key, another
        content is none."""
        now, have = _now(), []
        leading = self.leading(now, body)
        keys = split_keys(data)
        contents: Sequence[Content | None] = contents_of(body) or [None] * len(keys)
        for key, content in zip(keys, contents, strict=True):
            have.append(0 if self._granting.has(key, content) else self.where(now, key))
            if leading and have[-1]:
                break
        on_ssd = self._on_ssd(keys, have)
        return (Look(have, on_ssd, self._local.ssd_price()) if on_ssd else Look(have)).as_dict()

    def _on_ssd(self, keys: Sequence[BlockKey], have: Sequence[int]) -> list[int]:
        if self._local.ssd is None:
            return []
        answers = enumerate(zip(keys, have, strict=False))
        return [at for at, (key, answer) in answers if not answer and self._local.contains(key) == "ssd"]

    def leading(self, now: float, body: dict[str, Any]) -> bool:
        """Whether nothing behind the first missing block matters. It does when that one may be elsewhere."""
        return body.get("leading", False) and not self._passed_on.any(now)

    def where(self, now: float, key: BlockKey) -> int:
        """Instead of a slot of a block that is not here."""
        return ELSEWHERE if self._passed_on.has(now, key) else ABSENT

    async def _pin(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry in `slots` per key: a slot, ABSENT or ELSEWHERE; with `leading` it may end before the first that
        is no slot. `more` says that it ends early only for want of room: ask again from there. `lengths` is there when
        a block is shorter than its slot; the other lists are over the slots in order."""
        keys, leading = split_keys(data), self.leading(_now(), body)
        self._leases.open(peer, body["lease"], writes=False)
        pins = await self.pins(keys, leading)
        run, now = len(pins), _now()
        found = [(key, pin) for key, pin in zip(keys, pins, strict=False) if pin is not None]
        slots = [pin.slot for _, pin in found]
        granted = self._leases.grant(peer, body["lease"], slots, [key for key, _ in found], writes=False)
        lengths = [pin.nbytes for _, pin in found]
        reply = granted | {
            "slots": [self.where(now, key) if pin is None else pin.slot for key, pin in zip(keys, pins, strict=False)],
            "checksums": [pin.checksum for _, pin in found],
            "tiers": [pin.tier for _, pin in found],
            "more": run < len(keys) and self._local.contains(keys[run]) is not None,
        }
        if any(length != reply["slot_bytes"] for length in lengths):
            reply["lengths"] = lengths
        if hot := self.warm(now, keys):
            reply["hot"] = hot
        return reply

    async def pins(self, keys: list[BlockKey], leading: bool) -> list[Pin | None]:
        """LocalStore.pin_each, waiting a moment for room to promote the first one into."""
        pins = await self._local.pin_each(keys, leading)
        if pins or not self._local.count_leading(keys[:1]):
            return pins
        if await self._local.wait_for_room(self._deadlines.room_s, self._local.facts(keys[0])):
            pins = await self._local.pin_each(keys, leading)
        return pins

    def warm(self, now: float, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Count the reads; (position, replicas) of those that others have, too."""
        for key in keys:
            self.hot.read(now, key)
        told = self.hot.replicas
        return [(i, told[key]) for i, key in enumerate(keys) if key in told] if told else []

    async def _read(self, peer: str, body: dict[str, Any], data: memoryview) -> tuple[dict[str, Any], list[Buffer]]:
        """Like store.pin, with the blocks behind the reply instead of a lease. `slots` has a 0 for each of them."""
        keys, leading = split_keys(data), self.leading(_now(), body)
        ready = self._local.at_hand(keys)
        pins = await self.pins(keys, leading) if ready is None else [*ready]
        now, arena = _now(), self._local.arena
        found = [pin for pin in pins if pin is not None]
        reply: dict[str, Any] = {
            "slots": [self.where(now, key) if pin is None else 0 for key, pin in zip(keys, pins, strict=False)],
            "checksums": [pin.checksum for pin in found],
            "lengths": [pin.nbytes for pin in found],
            "tiers": [pin.tier for pin in found],
            "more": len(pins) < len(keys) and self._local.contains(keys[len(pins)]) is not None,
            "hot": self.warm(now, keys),
        }
        blocks: list[Buffer] = [arena.memory(pin.slot)[: pin.nbytes] for pin in found] if arena is not None else []
        if ready is None:
            self._local.unpin([pin.slot for pin in found])
        return reply, blocks  # the channel copies them before anybody else has a turn

    async def _write(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """Like store.reserve and store.commit in one. `lengths` and `checksums` are of the blocks that follow the keys.
        One entry per key: 0 when it is stored now, or PRESENT; fewer when room ends."""
        lengths, checksums, arena, owner = body["lengths"], body["checksums"], self._local.arena, owner_in(body)
        if not integers(lengths, len(lengths)) or not integers(checksums, len(lengths)):
            raise RemoteError("not a length and a checksum for each block", "bad_request")
        start = len(lengths) * KEY_BYTES
        keys = split_keys(data[:start])
        if len(keys) != len(lengths) or start + sum(lengths) != len(data):
            raise RemoteError(f"{len(data)} bytes are not {len(lengths)} keys and their blocks", "bad_request")
        if arena is not None and not all(0 < length <= arena.slot_bytes for length in lengths):
            raise RemoteError(f"blocks of {lengths} bytes, the slots have {arena.slot_bytes}", "layout")
        answers = await self._room(keys, body)
        rows = []
        for key, slot, length, block_checksum in zip(keys, answers, lengths, checksums, strict=False):
            if slot >= 0 and arena is not None:
                arena.memory(slot)[:length] = data[start : start + length]
                rows.append((key, slot, block_checksum, length))
            start += length
        for key, slot, block_checksum, length in reversed(rows):  # as in _commit
            self.stored(key, slot, block_checksum, length, owner, body.get("repair", False))
        return self.answers([min(0, answer) for answer in answers], len(keys))

    async def _unpin(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        """`bad`: positions in the lease whose bytes did not match; they are looked at here before they are dropped."""
        lease = self._leases.take(peer, body["lease"])
        if lease is None:
            return
        self._leases.give_back(lease.slots, writes=lease.writes)
        if bad := [lease.keys[position] for position in body.get("bad", ())]:
            task = spawn(self._inspect(bad), "looking at damaged blocks")
            self._inspections.add(task)
            task.add_done_callback(self._inspections.discard)

    async def _inspect(self, keys: list[BlockKey]) -> None:
        for key in keys:
            await self._local.verify(key)

    async def _reserve(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry per key: a slot, or instead of one what is said in cache/protocol.py; fewer entries than keys when
        room ends, and the others should go to the next member when the writer can (`divert`). `owner`: the home that
        this node stands in for. `facts`: of every block, or one row for all, or none. `decide`: no other home has been
        asked to take it. `repair`: it is a copy of a block that is elsewhere, and `kept` says which of them are never
        evicted there. `contents`, of such and other copies: [checksum, bytes] of every block."""
        keys = split_keys(data)
        repair = body.get("repair", False)
        self._leases.open(peer, body["lease"], writes=True, owner=owner_in(body), repair=repair)
        answers = await self._room(keys, body)
        granted = [(slot, key) for slot, key in zip(answers, keys, strict=False) if slot >= 0]
        slots, slot_keys = [slot for slot, _ in granted], [key for _, key in granted]
        granted_as = self._leases.grant(peer, body["lease"], slots, slot_keys, writes=True)
        return granted_as | self.answers(answers, len(keys))

    def answers(self, slots: list[int], count: int) -> dict[str, Any]:
        """To a request for `count` slots. Where room has ended because of the disk, `trouble` says so."""
        if len(slots) < count and (trouble := self._local.trouble):
            return {"slots": slots, "trouble": trouble}
        return {"slots": slots}

    async def _room(self, keys: list[BlockKey], body: dict[str, Any]) -> list[int]:
        """`room_now`, or where the writer cannot go elsewhere, once there is some."""
        answers = self.room_now(keys, body)
        if answers or body.get("divert", False) or not keys:
            return answers
        first = facts_in(body, len(keys))[0] or PLAIN
        return self.room_now(keys, body) if await self._local.wait_for_room(self._deadlines.room_s, first) else answers

    def room_now(self, keys: list[BlockKey], body: dict[str, Any]) -> list[int]:
        """Slots, or what is said instead, for a leading part of `keys` (cache/tiers/granting.py). With `divert` the
        writer of the others is passed on."""
        now = _now()
        answers = self._granting.grant(now, keys, body)
        if body.get("divert", False):
            for key in keys[len(answers) :]:
                self._passed_on.add(now, key)
        return answers

    async def _commit(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One checksum per slot of the lease, in its order, and one of `lengths` where blocks are shorter."""
        lease = self._leases.take(peer, body["lease"])
        if lease is None:
            raise RemoteError("the reservation has expired", "expired")
        left: list[int] = list(lease.slots)
        checksums: Any = body.get("checksums")
        lengths = body.get("lengths") or [-1] * len(left)
        try:
            if not lease.writes or not integers(checksums, len(left)) or not integers(lengths, len(left)):
                raise ValueError(f"not one checksum, and one length if any, for each of {len(left)} slots")
            rows = list(zip(lease.keys, lease.slots, checksums, lengths, strict=True))
            for key, slot, block_checksum, length in reversed(rows):
                # A prompt's last block first: of equals, the first to be evictable is the first to go.
                self.stored(key, slot, block_checksum, length, lease.owner, lease.repair)
                left.pop()
        except ValueError as error:
            self._leases.give_back(left, writes=lease.writes)
            raise RemoteError(str(error), "bad_request") from None
        return {"stored": len(rows)}

    def stored(self, key: BlockKey, slot: int, block_checksum: int, length: int, owner: str, repair: bool) -> None:
        """Raises ValueError for an impossible length."""
        self._local.commit(key, slot, block_checksum, length)
        self._granting.stored(key, repair)
        self._passed_on.discard(key)
        if owner:
            self.hints.add(key, owner)

    async def _remove(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        keys = split_keys(data)
        now = _now()
        for key in keys:
            self.removed(now, key, self._local.content(key))
        self.hints.settled(keys)
        return {"removed": await self._local.remove(keys)}

    def removed(self, now: float, key: BlockKey, content: Content | None) -> None:
        """The content was removed: refuse copies of it, but not a new put."""
        self._granting.removals.add(now, key, content)

    async def _uneven(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        self.uneven.add(split_keys(data))

    async def _bad(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        await self._inspect(split_keys(data))

    async def _used(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        keys = split_keys(data)
        self._local.used(keys)
        self.warm(_now(), keys)

    # --- accounts and life

    def stats(self) -> dict[str, int]:
        """Leases now, how many ended without a word of their owner, blocks kept for other homes, and how many copies
        had another content than this home."""
        return {
            "leases": len(self._leases),
            "leases_expired": self._leases.expired,
            "hints": len(self.hints),
            "hot": len(self.hot),
            "uneven": self.uneven.seen,
        }

    async def close(self) -> None:
        """Give everything back. Channel and transfer engine must be closed before: nobody writes here any more."""
        if self._inspections:
            await asyncio.wait(list(self._inspections))
        await self._leases.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
