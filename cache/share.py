"""Share: the serving half of the pooled store. Peers pin, read, reserve and write blocks of this node's LocalStore.

The bytes of all but small blocks never pass through here: a reply names the arena and the slots, and the peer's
transfer engine reads or writes them. What a peer may touch is a lease, numbered by the peer:

    store.has      keys -> which of them are here
    store.pin      keys -> lease on those that are here, to read
    store.reserve  keys -> lease on new slots, to write         ──> store.commit ends it
    store.unpin    ends a lease of either kind, also one whose grant is still on its way
    store.read     keys -> small blocks themselves, in one message
    store.write    small blocks -> stored, in one message
    store.bad      keys of blocks that arrived damaged by store.read
    store.remove   keys -> nobody finds them here any more
    store.flush    what was committed here so far is on SSD, and synced, when the answer comes

A home without room passes writers on to the next member of the ranking (bounded load) and remembers for which keys, so
that it can pass on readers, too. Blocks that came here in place of another home are in `hints` until it has them.

Every lease ends: by its owner's word, when its owner goes or is lost, or at its deadline. Slots that were pinned are
then free to change; a peer that still reads them finds out by the checksum. Slots that were reserved are not: a
late byte would damage the block of another. They are reused only behind the transfer engine's fence, and a peer that
sits on a reservation past its deadline is dropped for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.arena import Buffer
from cache.block import KEY_BYTES, BlockKey
from cache.heat import Heat
from cache.policy import Facts
from cache.repair import Hints
from cache.tiers import LocalStore, NoSpace, Pin
from net.channel import Channel
from net.errors import RemoteError
from net.transfer import TransferEngine

log = logging.getLogger(__name__)

PRESENT = -1
"""Instead of a slot to write: the block is here already, or somebody is writing it, or admission refuses it."""

ABSENT, ELSEWHERE = -1, -2
"""Instead of a slot to read: the block is not here; not here, but this home has passed its writer on."""

PASSED_ON_MAX = 1 << 16  # keys
PASSED_ON_S = 600.0
REMOVED_S = 60.0  # so long copies that others offer of a removed block are not taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. A lease outlives the messages and the transfer it is for."""

    lookup_s: float = 2.0  # answer to store.has
    control_s: float = 10.0  # answer to pin (it may read from SSD), reserve, commit
    transfer_s: float = 10.0
    lease_s: float = 45.0
    room_s: float = 2.0  # a request for slots waits this long for a write to SSD to free one
    shun_s: float = 1.0  # a home that did not answer in time is not asked again for this long
    flush_s: float = 60.0  # answer to flush


@dataclass(slots=True)
class Lease:
    """Slots a peer may touch until the timer fires; none before the grant."""

    writes: bool
    timer: asyncio.TimerHandle
    slots: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    owner: str = ""  # the home these blocks are kept for


class Recent:
    """The keys of the last `most` calls of `add`, each for `seconds`."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._until: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, now: float, key: BlockKey) -> None:
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > self._most:
            self._until.popitem(last=False)

    def has(self, now: float, key: BlockKey) -> bool:
        until = self._until.get(key)
        if until is not None and until < now:
            del self._until[key]
            return False
        return until is not None

    def any(self, now: float) -> bool:
        """Whether there is one."""
        while self._until and next(iter(self._until.values())) < now:
            self._until.popitem(last=False)
        return bool(self._until)

    def discard(self, key: BlockKey) -> None:
        self._until.pop(key, None)


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as they travel: 16 bytes each, behind the header."""
    return b"".join(keys)


def split_keys(data: memoryview) -> list[BlockKey]:
    """Inverse of `join_keys`. Raises RemoteError when it is not a whole number of keys."""
    raw = bytes(data)
    if len(raw) % KEY_BYTES:
        raise RemoteError(f"{len(raw)} bytes are not block keys", "bad_request")
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


class Share:
    """Answers store.* messages on `channel` for `local`, which it does not own."""

    def __init__(
        self, node_id: str, channel: Channel, transfer: TransferEngine, local: LocalStore, deadlines: Deadlines
    ) -> None:
        self._node_id = node_id
        self._channel = channel
        self._transfer = transfer
        self._local = local
        self._deadlines = deadlines
        self._leases: dict[tuple[str, int], Lease] = {}
        self._fenced: dict[asyncio.Task[None], Lease] = {}  # ended, slots not yet safe to reuse
        self._inspections: set[asyncio.Task[None]] = set()
        self._expired = 0
        self.hints = Hints()
        self.heat = Heat()
        self.wanted: dict[BlockKey, int] = {}  # hot blocks -> replicas beyond the usual that they should get
        self.hot: dict[BlockKey, int] = {}  # hot blocks -> replicas that there are: readers are told
        self._passed_on = Recent(PASSED_ON_MAX, PASSED_ON_S)
        self._removed = Recent(PASSED_ON_MAX, REMOVED_S)
        for kind, handler in (
            ("store.has", self._has),
            ("store.pin", self._pin),
            ("store.unpin", self._unpin),
            ("store.reserve", self._reserve),
            ("store.commit", self._commit),
            ("store.read", self._read),
            ("store.write", self._write),
            ("store.bad", self._bad),
            ("store.remove", self._remove),
            ("store.flush", self._flush),
        ):
            channel.handle(kind, handler)
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    # --- messages

    async def _has(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry per key: 0, ABSENT or ELSEWHERE; with `leading` it may end at the first that is not 0."""
        now, have = _now(), []
        leading = self._leading(now, body)
        for key in split_keys(data):
            have.append(0 if self._local.contains(key) is not None else self._where(now, key))
            if leading and have[-1]:
                break
        return {"have": have}

    def _leading(self, now: float, body: dict[str, Any]) -> bool:
        """Whether nothing behind the first missing block matters. It does when that one may be elsewhere."""
        return body.get("leading", False) and not self._passed_on.any(now)

    def _where(self, now: float, key: BlockKey) -> int:
        return ELSEWHERE if self._passed_on.has(now, key) else ABSENT

    async def _pin(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry in `slots` per key: a slot, ABSENT or ELSEWHERE; with `leading` it may end before the first that
        is no slot. `more` says that it ends early only for want of room: ask again from there. `lengths` is there when
        a block is shorter than its slot; the other lists are over the slots in order."""
        keys, leading = split_keys(data), self._leading(_now(), body)
        self._open(peer, body["lease"], writes=False)
        pins = await self._pins(keys, leading)
        run, now = len(pins), _now()
        found = [(key, pin) for key, pin in zip(keys, pins, strict=False) if pin is not None]
        slots = [pin.slot for _, pin in found]
        granted = self._grant(peer, body["lease"], slots, [key for key, _ in found], writes=False)
        lengths = [pin.nbytes for _, pin in found]
        reply = granted | {
            "slots": [self._where(now, key) if pin is None else pin.slot for key, pin in zip(keys, pins, strict=False)],
            "checksums": [pin.checksum for _, pin in found],
            "tiers": [pin.tier for _, pin in found],
            "more": run < len(keys) and self._local.contains(keys[run]) is not None,
        }
        if any(length != reply["slot_bytes"] for length in lengths):
            reply["lengths"] = lengths
        if hot := self._warm(now, keys):
            reply["hot"] = hot
        return reply

    async def _pins(self, keys: list[BlockKey], leading: bool) -> list[Pin | None]:
        pins = await self._local.pin_each(keys, leading)
        if not pins and self._local.count_leading(keys[:1]) and await self._local.wait_for_room(self._deadlines.room_s):
            pins = await self._local.pin_each(keys, leading)
        return pins

    def _warm(self, now: float, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Count the reads; (position, replicas) of those that others have, too."""
        for key in keys:
            if extra := self.heat.read(now, key):
                self.wanted[key] = extra
        return [(i, self.hot[key]) for i, key in enumerate(keys) if key in self.hot] if self.hot else []

    async def _read(self, peer: str, body: dict[str, Any], data: memoryview) -> tuple[dict[str, Any], list[Buffer]]:
        """Like store.pin, with the blocks behind the reply instead of a lease. `slots` has a 0 for each of them."""
        keys, leading = split_keys(data), self._leading(_now(), body)
        pins = await self._pins(keys, leading)
        now, arena = _now(), self._local.arena
        found = [pin for pin in pins if pin is not None]
        reply: dict[str, Any] = {
            "slots": [self._where(now, key) if pin is None else 0 for key, pin in zip(keys, pins, strict=False)],
            "checksums": [pin.checksum for pin in found],
            "lengths": [pin.nbytes for pin in found],
            "tiers": [pin.tier for pin in found],
            "more": len(pins) < len(keys) and self._local.contains(keys[len(pins)]) is not None,
            "hot": self._warm(now, keys),
        }
        blocks = [arena.memory(pin.slot)[: pin.nbytes] for pin in found] if arena is not None else []
        copied = b"".join(blocks)  # of memory that others may have once it is unpinned
        self._local.unpin([pin.slot for pin in found])
        return reply, [copied]

    async def _write(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """Like store.reserve and store.commit in one. `lengths` and `checksums` are of the blocks that follow the keys.
        One entry per key: 0 when it is stored now, or PRESENT; fewer when room ends."""
        lengths, checksums, arena = body["lengths"], body["checksums"], self._local.arena
        start = len(lengths) * KEY_BYTES
        keys = split_keys(data[:start])
        if not len(keys) == len(lengths) == len(checksums) or start + sum(lengths) != len(data):
            raise RemoteError(f"{len(data)} bytes are not {len(lengths)} keys and their blocks", "bad_request")
        if arena is not None and not all(0 < length <= arena.slot_bytes for length in lengths):
            raise RemoteError(f"blocks of {lengths} bytes, the slots have {arena.slot_bytes}", "layout")
        answers = await self._room(keys, body)
        rows = []
        for key, slot, length, block_checksum in zip(keys, answers, lengths, checksums, strict=False):
            if slot != PRESENT and arena is not None:
                arena.memory(slot)[:length] = data[start : start + length]
                rows.append((key, slot, block_checksum, length))
            start += length
        for key, slot, block_checksum, length in reversed(rows):  # as in _commit
            self._stored(key, slot, block_checksum, length, body.get("owner", ""))
        return {"slots": [min(0, answer) for answer in answers]}

    async def _unpin(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        """`bad`: positions in the lease whose bytes did not match; they are looked at here before they are dropped."""
        lease = self._take(peer, body["lease"])
        if lease is None:
            return
        self._give_back(lease.slots, writes=lease.writes)
        if bad := [lease.keys[position] for position in body.get("bad", ())]:
            task = asyncio.create_task(self._inspect(bad))
            self._inspections.add(task)
            task.add_done_callback(self._inspections.discard)

    async def _inspect(self, keys: list[BlockKey]) -> None:
        for key in keys:
            await self._local.verify(key)

    async def _reserve(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry per key: a slot or PRESENT; fewer entries than keys when room ends, and the others should go to
        the next member when the writer can (`divert`). `owner`: the home that this node stands in for. `repair`: it
        is a copy of a block that is elsewhere. `facts`: of every block, or none."""
        keys = split_keys(data)
        self._open(peer, body["lease"], writes=True, owner=body.get("owner", ""))
        answers = await self._room(keys, body)
        granted = [(slot, key) for slot, key in zip(answers, keys, strict=False) if slot != PRESENT]
        slots, slot_keys = [slot for slot, _ in granted], [key for _, key in granted]
        return self._grant(peer, body["lease"], slots, slot_keys, writes=True) | {"slots": answers}

    async def _room(self, keys: list[BlockKey], body: dict[str, Any]) -> list[int]:
        """Slots, or PRESENT, for a leading part of `keys`."""
        facts: list[Facts | None] = [Facts(*values) for values in body.get("facts", ())]
        facts = facts or [None] * len(keys)
        repair = body.get("repair", False)
        answers = self._reserve_leading(keys, facts, repair)
        if body.get("divert", False):
            now = _now()
            for key in keys[len(answers) :]:
                self._passed_on.add(now, key)
        elif not answers and keys and await self._local.wait_for_room(self._deadlines.room_s):
            answers = self._reserve_leading(keys, facts, repair)
        return answers

    def _reserve_leading(self, keys: list[BlockKey], facts: Sequence[Facts | None], repair: bool) -> list[int]:
        answers: list[int] = []
        now = _now()
        for key, about in zip(keys, facts, strict=True):
            if repair and self._removed.has(now, key):
                answers.append(PRESENT)
                continue
            try:
                slot = self._local.reserve(key, about)
            except NoSpace:
                break
            answers.append(PRESENT if slot is None else slot)
        return answers

    async def _commit(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One checksum per slot of the lease, in its order, and one of `lengths` where blocks are shorter."""
        lease = self._take(peer, body["lease"])
        if lease is None:
            raise RemoteError("the reservation has expired", "expired")
        checksums, lengths = body["checksums"], body.get("lengths") or [-1] * len(body["checksums"])
        if not lease.writes or not len(checksums) == len(lengths) == len(lease.slots):
            self._give_back(lease.slots, writes=lease.writes)
            raise RemoteError(f"{len(checksums)} checksums for {len(lease.slots)} slots", "bad_request")
        rows = list(zip(lease.keys, lease.slots, checksums, lengths, strict=True))
        rows.reverse()  # a prompt's last block first: of equals, the first to be evictable is the first to go
        for at, (key, slot, block_checksum, length) in enumerate(rows):
            try:
                self._stored(key, slot, block_checksum, length, lease.owner)
            except ValueError as error:
                self._give_back([slot for _, slot, _, _ in rows[at:]], writes=True)
                raise RemoteError(str(error), "bad_request") from None
        return {"stored": len(checksums)}

    def _stored(self, key: BlockKey, slot: int, block_checksum: int, length: int, owner: str) -> None:
        """Raises ValueError for an impossible length."""
        self._local.commit(key, slot, block_checksum, length)
        self._passed_on.discard(key)
        if owner:
            self.hints.add(key, owner)

    async def _remove(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        keys = split_keys(data)
        now = _now()
        for key in keys:
            self._removed.add(now, key)
        self.hints.settled(keys)
        return {"removed": await self._local.remove(keys)}

    async def _bad(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        await self._inspect(split_keys(data))

    async def _flush(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        await self._local.flush()

    # --- leases

    def _open(self, peer: str, number: int, *, writes: bool, owner: str = "") -> None:
        """The lease exists before its grant, so that the peer can end it while it waits."""
        if (peer, number) in self._leases:
            raise RemoteError(f"lease {number} is in use", "bad_request")
        timer = asyncio.get_running_loop().call_later(self._deadlines.lease_s, self._expire, peer, number)
        self._leases[peer, number] = Lease(writes, timer, owner=owner)

    def _grant(self, peer: str, number: int, slots: list[int], keys: list[BlockKey], *, writes: bool) -> dict[str, Any]:
        """Put the slots under the lease; returns how the peer reaches them. Without slots the lease is over."""
        lease = self._leases.get((peer, number))
        if lease is None:
            self._give_back(slots, writes=writes)
            raise RemoteError("the lease has ended before its grant", "expired")
        lease.slots, lease.keys = slots, keys
        arena = self._local.arena
        if not slots or arena is None:
            self._take(peer, number)
            return {"region": "", "slot_bytes": 0}
        return {"region": arena.name, "slot_bytes": arena.slot_bytes}

    def _take(self, peer: str, number: int) -> Lease | None:
        """End the lease; its slots are the caller's to settle. None when the peer has none by that number."""
        lease = self._leases.pop((peer, number), None)
        if lease is not None:
            lease.timer.cancel()
        return lease

    def _give_back(self, slots: list[int], *, writes: bool) -> None:
        give: Callable[[list[int]], None] = self._abandon if writes else self._local.unpin
        give(slots)

    def _abandon(self, slots: list[int]) -> None:
        for slot in slots:
            self._local.abandon(slot)

    def _expire(self, peer: str, number: int) -> None:
        lease = self._take(peer, number)
        if lease is None:
            return
        if lease.writes and lease.slots and peer != self._node_id:
            self._channel.drop(peer, f"it sat on reserved slots for {self._deadlines.lease_s:g} s")
        self._settle(peer, lease)

    def _gone(self, peer: str) -> None:
        for owner, number in [name for name in self._leases if name[0] == peer]:
            if (lease := self._take(owner, number)) is not None:
                self._settle(peer, lease)

    def _settle(self, peer: str, lease: Lease) -> None:
        """Give back what was leased, as soon as the peer can do no harm to it."""
        self._expired += 1
        if not lease.writes or not lease.slots or peer == self._node_id:
            self._give_back(lease.slots, writes=lease.writes)
            return
        task = asyncio.create_task(self._behind_fence(peer, lease))
        self._fenced[task] = lease
        task.add_done_callback(lambda done: self._fenced.pop(done, None))

    async def _behind_fence(self, peer: str, lease: Lease) -> None:
        while True:
            try:
                await self._transfer.fence(peer)
                break
            except TimeoutError as error:
                log.warning("%d reserved slots stay held: %s", len(lease.slots), error)
        self._give_back(lease.slots, writes=True)

    # --- accounts and life

    def stats(self) -> dict[str, int]:
        """Leases now, how many ended without a word of their owner, and blocks kept for other homes."""
        leases = len(self._leases) + len(self._fenced)
        return {"leases": leases, "leases_expired": self._expired, "hints": len(self.hints), "hot": len(self.hot)}

    async def close(self) -> None:
        """Give everything back. Channel and transfer engine must be closed before: nobody writes here any more."""
        fenced = list(self._fenced.items())
        for task, _ in fenced:
            task.cancel()
        if tasks := [*self._inspections, *self._fenced]:
            await asyncio.wait(tasks)
        rest = [lease for task, lease in fenced if task.cancelled()] + list(self._leases.values())
        self._leases.clear()
        for lease in rest:
            lease.timer.cancel()
            self._give_back(lease.slots, writes=lease.writes)


def _now() -> float:
    return asyncio.get_running_loop().time()
