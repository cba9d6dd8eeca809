"""BulkShare: peers' questions over data connections for blocks of this node's share: GET and PUT.

    GET  keys -> the blocks, sent from their slots; the slots are held until the socket has accepted the bytes
    PUT  keys and blocks -> received into new slots, which become blocks with their checksums at the end

One question replaces the leases and messages of cache/server/server.py. A put whose sender disappears midway stores
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from cache.block import BlockKey
from cache.bulk_messages import GET, PUT, Get, Got, Put, PutEnd
from cache.offer import Offer
from cache.protocol import PRESENT, split_keys
from cache.server.server import StoreServer
from cache.tiers.local_store import LocalStore, Pin
from net.bodies import BodyError, decode, encode
from net.channel.wire import nowhere
from net.errors import RemoteError
from net.loop.clock import loop_time
from net.transfer.tcp.bulk_call import Answer, Source, Views, joined
from net.transfer.tcp.bulk_calls import BulkCalls


class BulkShare:
    """Answers for `local`, with the accounts of `share`."""

    def __init__(self, bulk: BulkCalls, local: LocalStore, share: StoreServer) -> None:
        self._local = local
        self._share = share
        bulk.answer(GET, self._get)
        bulk.receive(PUT, self._put)

    # --- get

    def _get(self, peer: str, body: dict[str, Any]) -> Answer | Coroutine[Any, Any, Answer]:
        self._share.settle()
        asked = decode(Get, body)
        keys = split_keys(asked.keys)
        pins = self._local.pinning.pin_now(keys)
        if pins is None:
            return self._get_later(keys, self._share.leading(loop_time(), asked.leading))
        return self._answer(keys, pins)

    async def _get_later(self, keys: list[BlockKey], leading: bool) -> Answer:
        """The answer if some blocks are not in DRAM."""
        return self._answer(keys, await self._share.pins(keys, leading))

    def _answer(self, keys: list[BlockKey], pins: Sequence[Pin | None]) -> Answer:
        now, arena = loop_time(), self._local.arena
        found = [pin for pin in pins if pin is not None]
        slots = None
        if len(found) < len(keys):
            pairs = zip(keys, pins, strict=False)
            slots = [self._share.where(now, key) if pin is None else 0 for key, pin in pairs]
        lengths = [pin.nbytes for pin in found]
        size = arena.slot_bytes if arena is not None else 0
        got = Got(
            [pin.checksum for pin in found],
            slots,
            lengths=lengths if any(length != size for length in lengths) else (),
            tiers=[pin.tier for pin in found] if any(pin.tier != "dram" for pin in found) else (),
            more=len(pins) < len(keys) and self._local.readable(keys[len(pins)]) is not None,
            hot=self._share.warm(now, keys),
        )
        if arena is None or not found:
            return Answer(encode(got))
        views = [arena.memory(pin.slot)[: pin.nbytes] for pin in found]
        return Answer(
            encode(got), joined(views), sum(lengths), partial(self._local.pinning.unpin, [pin.slot for pin in found])
        )

    # --- put

    def _put(self, peer: str, body: dict[str, Any], nbytes: int) -> Arriving:
        put, arena = decode(Put, body), self._local.arena
        keys = split_keys(put.keys)
        size = arena.slot_bytes if arena is not None else 0
        lengths = put.lengths or [size] * len(keys)
        if len(lengths) != len(keys) or sum(lengths) != nbytes or min(lengths, default=1) < 1:
            raise BodyError(f"{nbytes} bytes are not {len(keys)} blocks of these lengths")
        if arena is not None and max(lengths, default=0) > size:
            raise RemoteError(f"blocks of {max(lengths)} bytes, the slots have {size}", "layout")
        put.offer.check(len(keys))
        self._share.settle()
        slots = self._share.room_now(keys, put.offer)
        return Arriving(self._local, self._share, keys, lengths, slots, put.offer, put.checksums)


class Arriving:
    """Blocks that arrive in `slots`, one for each of a leading part of `keys`; a number below 0 is no slot. See
    net.transfer.tcp.bulk_call.Receiving."""

    regions: Collection[str] = ()  # the arena stays registered as long as the node takes questions

    def __init__(
        self,
        local: LocalStore,
        share: StoreServer,
        keys: list[BlockKey],
        lengths: Sequence[int],
        slots: list[int],
        offer: Offer,
        checksums: Sequence[int],
    ) -> None:
        self._local, self._share, self._offer = local, share, offer
        self._keys, self._lengths, self._slots, self._checksums = keys, lengths, slots, checksums
        arena = local.arena
        views: list[memoryview] = []
        for at, length in enumerate(lengths):
            slot = slots[at] if at < len(slots) else PRESENT
            if slot < 0 or arena is None:
                views += nowhere(length)
            else:
                views.append(arena.memory(slot)[:length])
        self.target: Source = Views(views)

    def finish(self, tail: dict[str, Any]) -> Answer:
        try:
            checksums = self._checksums or decode(PutEnd, tail).checksums
            if len(checksums) != len(self._keys):
                raise BodyError(f"{len(checksums)} checksums of {len(self._keys)} blocks")
        except BodyError:
            self.drop()
            raise
        rows = list(enumerate(zip(self._keys, self._slots, checksums, self._lengths, strict=False)))
        for at, (key, slot, block_checksum, length) in reversed(rows):  # in StoreServer's order
            if slot >= 0:
                self._slots[at] = self._share.stored(key, slot, (block_checksum, length), self._offer)
        return Answer(encode(self._share.taken(self._slots, len(self._keys))))

    def drop(self) -> None:
        for slot in self._slots:
            if slot >= 0:
                self._local.reservations.abandon(slot)
