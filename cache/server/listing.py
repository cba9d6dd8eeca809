"""Listing: answers peers that look for blocks by the first bytes of their keys.

LIST     a prefix -> keys that begin with it
OUTSETS  keys -> the first bytes of their blocks; those on SSD are read, a slot at a time
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cache.arena import Buffer
from cache.block import BlockKey
from cache.messages import LIST, LISTED_MAX, OUTSETS, OUTSETS_MAX, Listed, ListKeys, Outsets, ReadOutsets
from cache.protocol import join_keys, split_keys
from cache.tiers.local_store import LocalStore, Pin
from net.bodies import BodyError, typed
from net.channel.channel import Channel

OUTSET_MAX_BYTES = 4 << 10


class Listing:
    """Answers for `local`. `pins` holds blocks in DRAM, like StoreServer.pins. `settle()`: announced blocks are
    here now (cache/server/lending.py)."""

    def __init__(
        self,
        channel: Channel,
        local: LocalStore,
        pins: Callable[[list[BlockKey], bool], Awaitable[list[Pin | None]]],
        settle: Callable[[], None],
    ) -> None:
        self._settle = settle
        self._local = local
        self._pins = pins
        channel.handle(LIST, typed(ListKeys, self._list))
        channel.handle(OUTSETS, typed(ReadOutsets, self._outsets))

    async def _list(self, peer: str, body: ListKeys, data: memoryview) -> tuple[Listed, list[Buffer]]:
        self._settle()
        here = self._local.keys()
        keys = sorted(key for key in here if key.startswith(body.prefix) and key > body.after)
        return Listed(len(keys) > LISTED_MAX), [join_keys(keys[:LISTED_MAX])]

    async def _outsets(self, peer: str, body: ReadOutsets, data: memoryview) -> tuple[Outsets, list[Buffer]]:
        self._settle()
        keys = split_keys(data)
        if len(keys) > OUTSETS_MAX or not 0 < body.nbytes <= OUTSET_MAX_BYTES:
            raise BodyError(f"{body.nbytes} bytes of {len(keys)} blocks")
        outsets = [await self._outset(key, body.nbytes) for key in keys]
        return Outsets([len(outset) for outset in outsets]), list(outsets)

    async def _outset(self, key: BlockKey, nbytes: int) -> bytes:
        """Empty if the block is not here."""
        arena = self._local.arena
        if arena is None:
            return b""
        pins = [pin for pin in await self._pins([key], False) if pin is not None]
        try:
            return b"".join(bytes(arena.memory(pin.slot)[: min(nbytes, pin.nbytes)]) for pin in pins)
        finally:
            self._local.pinning.unpin([pin.slot for pin in pins])
