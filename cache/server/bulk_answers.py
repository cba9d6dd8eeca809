"""BulkShare: peers' questions over data connections for blocks of this node's share: store.get and store.put.

    store.get   keys -> the blocks, sent from their slots, which are held until the socket has them
    store.put   keys and blocks -> received into new slots, which become blocks with their checksums at the end

What cache/server/server.py does with leases and messages; one question does for a call here. A put whose asker goes in
its middle leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from cache.block import KEY_BYTES, BlockKey
from cache.protocol import GET, PRESENT, PUT, integers, owner_in, split_keys
from cache.server.server import StoreServer
from cache.tiers.local_store import LocalStore, Pin
from net.channel.wire import nowhere
from net.errors import RemoteError
from net.transfer.tcp.bulk_call import Answer, Source, Views, joined
from net.transfer.tcp.bulk_calls import BulkCalls


class BulkShare:
    """Answers for `local`, by the books of `share`."""

    def __init__(self, bulk: BulkCalls, local: LocalStore, share: StoreServer) -> None:
        self._local = local
        self._share = share
        bulk.answer(GET, self._get)
        bulk.receive(PUT, self._put)

    # --- get

    def _get(self, peer: str, body: dict[str, Any]) -> Answer | Coroutine[Any, Any, Answer]:
        """Body: keys, in hexadecimal; leading. The answer: checksums; and only where they say something: slots, one
        per key as in store.pin but with 0 for each that is there; lengths; tiers; more; hot."""
        keys = _keys(body)
        pins = self._local.pin_now(keys)
        if pins is None:
            return self._get_later(keys, self._share.leading(_now(), body))
        return self._answer(keys, pins)

    async def _get_later(self, keys: list[BlockKey], leading: bool) -> Answer:
        """Something is not in DRAM."""
        return self._answer(keys, await self._share.pins(keys, leading))

    def _answer(self, keys: list[BlockKey], pins: Sequence[Pin | None]) -> Answer:
        now, arena = _now(), self._local.arena
        found = [pin for pin in pins if pin is not None]
        body: dict[str, Any] = {"checksums": [pin.checksum for pin in found]}
        if len(found) < len(keys):
            pairs = zip(keys, pins, strict=False)
            body["slots"] = [self._share.where(now, key) if pin is None else 0 for key, pin in pairs]
            body["more"] = len(pins) < len(keys) and self._local.contains(keys[len(pins)]) is not None
        if hot := self._share.warm(now, keys):
            body["hot"] = hot
        if arena is None or not found:
            return Answer(body)
        lengths = [pin.nbytes for pin in found]
        if any(length != arena.slot_bytes for length in lengths):
            body["lengths"] = lengths
        if any(pin.tier != "dram" for pin in found):
            body["tiers"] = [pin.tier for pin in found]
        views = [arena.memory(pin.slot)[: pin.nbytes] for pin in found]
        return Answer(body, joined(views), sum(lengths), partial(self._local.unpin, [pin.slot for pin in found]))

    # --- put

    def _put(self, peer: str, body: dict[str, Any], nbytes: int) -> Arriving:
        """Body: keys, in hexadecimal; lengths where a block is shorter than its slot; and what store.reserve is told.
        The tail: checksums. The answer: slots, as of store.write."""
        keys, arena = _keys(body), self._local.arena
        size = arena.slot_bytes if arena is not None else 0
        lengths = body.get("lengths") or [size] * len(keys)
        if not integers(lengths, len(keys)) or sum(lengths) != nbytes:
            raise RemoteError(f"{nbytes} bytes are not {len(keys)} blocks of these lengths", "bad_request")
        if arena is not None and not all(0 < length <= size for length in lengths):
            raise RemoteError(f"blocks of {max(lengths)} bytes, the slots have {size}", "layout")
        owner = owner_in(body)
        slots = self._share.room_now(keys, body)
        return Arriving(self._local, self._share, keys, lengths, slots, owner, body.get("repair", False))


class Arriving:
    """Blocks on their way into `slots`, of which a leading part of `keys` has one; less than 0 is none. See
    net.transfer.tcp.bulk_call.Receiving."""

    def __init__(
        self,
        local: LocalStore,
        share: StoreServer,
        keys: list[BlockKey],
        lengths: list[int],
        slots: list[int],
        owner: str,
        repair: bool,
    ) -> None:
        self._local, self._share, self._repair = local, share, repair
        self._keys, self._lengths, self._slots, self._owner = keys, lengths, slots, owner
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
        checksums: Any = tail.get("checksums")
        if not integers(checksums, len(self._keys)):
            self.drop()
            raise RemoteError(f"not one checksum for each of {len(self._keys)} blocks", "bad_request")
        rows = list(zip(self._keys, self._slots, checksums, self._lengths, strict=False))
        for key, slot, block_checksum, length in reversed(
            rows
        ):  # as in StoreServer: of equals, the last block goes first
            if slot >= 0:
                self._share.stored(key, slot, block_checksum, length, self._owner, self._repair)
        return Answer(self._share.answers([min(0, slot) for slot in self._slots], len(self._keys)))

    def drop(self) -> None:
        for slot in self._slots:
            if slot >= 0:
                self._local.abandon(slot)


def _keys(body: dict[str, Any]) -> list[BlockKey]:
    """Raises RemoteError."""
    try:
        return split_keys(bytes.fromhex(body["keys"]))
    except (ValueError, TypeError, KeyError):
        raise RemoteError(f"keys are {2 * KEY_BYTES} hexadecimal digits each", "bad_request") from None


def _now() -> float:
    return asyncio.get_running_loop().time()
