"""Share: the serving half of the pooled store. Peers pin, read, reserve and write blocks of this node's LocalStore.

The bytes themselves never pass through here: a reply names the arena and the slots, and the peer's transfer engine
reads or writes them. What a peer may touch is a lease on those slots:

    store.has      keys -> length of the leading run that is here
    store.pin      keys -> lease on the leading run, to read          ──> store.unpin
    store.reserve  keys -> lease on new slots, to write               ──> store.commit

Every lease ends: by its owner's word, when its owner is lost, or at its deadline. After that a slow peer may read
or write bytes that are no longer its block's; checksums turn that into a miss. So that this stays rare, the lease
outlives the deadline of any transfer, and a lost writer's slots rest for a moment: what it sent may still arrive.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cache.block import KEY_BYTES, BlockKey
from cache.tiers import LocalStore, NoSpace
from net.channel import Channel
from net.errors import RemoteError

PRESENT = -1
"""Instead of a slot: the block is here already, or somebody is writing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. A lease lives longer than the transfer it is for, or the transfer would outlive it."""

    lookup_s: float = 2.0  # answer to store.has
    control_s: float = 10.0  # answer to pin (it may read from SSD), reserve, commit
    transfer_s: float = 10.0
    lease_s: float = 30.0
    grace_s: float = 1.0  # slots of a lost writer rest this long
    room_s: float = 2.0  # a reservation waits this long for a write to SSD to free a slot
    shun_s: float = 1.0  # a home that did not answer in time is not asked again for this long


@dataclass(slots=True)
class Lease:
    """Slots a peer may touch until the timer fires."""

    peer: str
    slots: list[int]
    keys: list[BlockKey]
    writes: bool
    timer: asyncio.TimerHandle


def join_keys(keys: list[BlockKey]) -> bytes:
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

    def __init__(self, local: LocalStore, channel: Channel, deadlines: Deadlines) -> None:
        self._local = local
        self._deadlines = deadlines
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)
        self._expired = 0
        self._damaged: set[asyncio.Task[None]] = set()
        for kind, handler in (
            ("store.has", self._has),
            ("store.pin", self._pin),
            ("store.unpin", self._unpin),
            ("store.reserve", self._reserve),
            ("store.commit", self._commit),
        ):
            channel.handle(kind, handler)
        channel.on_lost(self._lost)

    # --- messages

    async def _has(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        return {"leading": self._local.count_leading(split_keys(data))}

    async def _pin(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """Pins the leading run; `more` says that it ends here only for want of room: ask again from there."""
        keys = split_keys(data)
        pins = await self._local.pin(keys)
        if not pins and self._local.count_leading(keys[:1]) and await self._local.wait_for_room(self._deadlines.room_s):
            pins = await self._local.pin(keys)
        run = len(pins)
        more = run < len(keys) and self._local.contains(keys[run]) is not None
        return self._reply(peer, [pin.slot for pin in pins], keys[:run], writes=False) | {
            "slots": [pin.slot for pin in pins],
            "checksums": [pin.checksum for pin in pins],
            "tiers": [pin.tier for pin in pins],
            "more": more,
        }

    async def _unpin(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        """`bad`: positions in the lease whose bytes did not match; they are looked at here before they are dropped."""
        lease = self._take(peer, body["lease"])
        if lease is None:
            return
        self._give_back(lease)
        if bad := [lease.keys[position] for position in body.get("bad", ())]:
            task = asyncio.create_task(self._inspect(bad))
            self._damaged.add(task)
            task.add_done_callback(self._damaged.discard)

    async def _inspect(self, keys: list[BlockKey]) -> None:
        for key in keys:
            await self._local.verify(key)

    async def _reserve(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One entry per key: a slot or PRESENT; fewer entries than keys when room ends."""
        keys = split_keys(data)
        answers = self._reserve_leading(keys)
        if not answers and keys and await self._local.wait_for_room(self._deadlines.room_s):
            answers = self._reserve_leading(keys)
        granted = [(slot, key) for slot, key in zip(answers, keys, strict=False) if slot != PRESENT]
        slots, slot_keys = [slot for slot, _ in granted], [key for _, key in granted]
        return self._reply(peer, slots, slot_keys, writes=True) | {"slots": answers}

    def _reserve_leading(self, keys: list[BlockKey]) -> list[int]:
        answers: list[int] = []
        for key in keys:
            try:
                slot = self._local.reserve(key)
            except NoSpace:
                break
            answers.append(PRESENT if slot is None else slot)
        return answers

    async def _commit(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        """One checksum per slot of the lease, in its order."""
        lease = self._take(peer, body["lease"])
        if lease is None:
            raise RemoteError("the reservation has expired", "expired")
        checksums = body["checksums"]
        if len(checksums) != len(lease.slots):
            self._give_back(lease)
            raise RemoteError(f"{len(checksums)} checksums for {len(lease.slots)} slots", "bad_request")
        for key, slot, block_checksum in zip(lease.keys, lease.slots, checksums, strict=True):
            self._local.commit(key, slot, block_checksum)
        return {"stored": len(checksums)}

    # --- leases

    def _reply(self, peer: str, slots: list[int], keys: list[BlockKey], *, writes: bool) -> dict[str, Any]:
        """The common part of an answer that grants slots."""
        arena = self._local.arena
        lease_id = 0
        if slots:
            lease_id = next(self._ids)
            timer = self._later(self._deadlines.lease_s, lease_id)
            self._leases[lease_id] = Lease(peer, slots, keys, writes, timer)
        return {
            "lease": lease_id,
            "region": arena.name if arena is not None else "",
            "slot_bytes": arena.slot_bytes if arena is not None else 0,
        }

    def _later(self, seconds: float, lease_id: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._expire, lease_id)

    def _take(self, peer: str, lease_id: int) -> Lease | None:
        """End the peer's lease; its slots are the caller's to settle. None when it has none by that number."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.peer != peer:
            return None
        lease.timer.cancel()
        return self._leases.pop(lease_id)

    def _give_back(self, lease: Lease) -> None:
        give: Callable[[list[int]], None] = self._abandon if lease.writes else self._local.unpin
        give(lease.slots)

    def _abandon(self, slots: list[int]) -> None:
        for slot in slots:
            self._local.abandon(slot)

    def _expire(self, lease_id: int) -> None:
        self._expired += 1
        self._give_back(self._leases.pop(lease_id))

    def _lost(self, peer: str) -> None:
        for lease_id, lease in list(self._leases.items()):
            if lease.peer != peer:
                continue
            lease.timer.cancel()
            if lease.writes:
                lease.timer = self._later(self._deadlines.grace_s, lease_id)
            else:
                self._expire(lease_id)

    def stats(self) -> dict[str, int]:
        """Leases now, and how many ended without a word of their owner."""
        return {"leases": len(self._leases), "leases_expired": self._expired}

    async def close(self) -> None:
        """Give everything back. The channel must be closed first, or peers are granted new leases."""
        for lease in self._leases.values():
            lease.timer.cancel()
            self._give_back(lease)
        self._leases.clear()
        if self._damaged:
            await asyncio.wait(self._damaged)
