"""DramSlots: length, checksum and facts of the block in each slot of an arena, and the index for readers on this
host."""

from __future__ import annotations

from typing import NamedTuple

from cache.arena import UNCHECKED, Arena
from cache.block import BlockKey
from cache.index.shared_index import INDEX_REGION, SharedIndex, index_bytes
from cache.pool.block_pool import BlockPool
from cache.pool.policy import PLAIN, Facts
from net.transfer.common.memory import Region


class Pin(NamedTuple):
    """A block that stays in its slot until `unpin`."""

    slot: int
    checksum: int
    tier: str  # the tier where it was found: dram or ssd
    nbytes: int = -1  # length of the block


class DramSlots:
    """The slots of `arena`, which `pool` allocates. A slot is filled before its block gets a name in the pool."""

    def __init__(self, arena: Arena | None, pool: BlockPool) -> None:
        count = arena.num_slots if arena is not None else 0
        self.slot_bytes = arena.slot_bytes if arena is not None else 0
        self._arena = arena
        self._pool = pool
        self._checksums = [0] * count
        self._lengths = [0] * count
        self._facts = [PLAIN] * count
        self.index_region: Region | None = None  # the caller registers it
        if arena is not None and arena.region.memfd is not None:
            self.index_region = Region.shared(INDEX_REGION, index_bytes(count))
            self._index = SharedIndex(self.index_region, arena.name, arena.slot_bytes)
            pool.watch(self._show)

    def fill(self, slot: int, block_checksum: int, length: int, facts: Facts) -> None:
        """The slot now has the bytes of a block."""
        self._checksums[slot], self._lengths[slot], self._facts[slot] = block_checksum, length, facts

    def facts(self, slot: int) -> Facts:
        return self._facts[slot]

    def checksum(self, slot: int) -> int:
        return self._checksums[slot]

    def length(self, slot: int) -> int:
        """Length of the block in the slot, bytes."""
        return self._lengths[slot]

    def memory(self, slot: int) -> memoryview:
        """The bytes of the block in the slot."""
        assert self._arena is not None
        return self._arena.memory(slot)[: self._lengths[slot]]

    def pin(self, slot: int, tier: str) -> Pin:
        return Pin(slot, self._checksums[slot], tier, self._lengths[slot])

    def _show(self, key: BlockKey, here: bool) -> None:
        slot = self._pool.lookup(key) if here else None
        if slot is None:
            self._index.drop(key)
        elif self._checksums[slot] != UNCHECKED:  # a reader must be able to verify the block
            self._index.put(key, slot, self._lengths[slot], self._checksums[slot])

    def close(self) -> None:
        if self.index_region is not None:
            self.index_region.close()
