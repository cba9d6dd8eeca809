"""SharedIndex: the blocks in this node's DRAM and their locations, in memory that processes of the host read directly.

    header     magic, version, bytes of a slot, number of buckets, name of the arena's region
    bucket     8 rows; a key's bucket is its hash modulo their number
    row        key, checksum xor hash of the key, slot, length; a length of 0 marks an empty row

There are no locks. A reader copies the block and compares its checksum. A half-written row, or a slot that holds
another block by now, never matches, because the checksum is mixed with the key's hash. Then the reader sends a message
instead. It also does so for a block that has no row because its bucket is full.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from cache.block import KEY_BYTES, BlockKey
from net.transfer.common.memory import Region

INDEX_REGION = "store-index"
HEADER = Struct("<8sQQQ32s")
HEADER_BYTES = 64
MAGIC, VERSION = b"mckindex", 1
ROW = Struct("<16sQII")
PLACE = Struct("<QII")  # a row without its key
ROWS = 8
BUCKET = ROWS * ROW.size
LOAD = 0.5  # share of the rows in use when all slots are; then 1 of 10^5 buckets is full
EMPTY = bytes(ROW.size)


class Row(NamedTuple):
    """The location of a block in the arena of the index's owner."""

    slot: int
    length: int
    checksum: int


def index_bytes(num_slots: int) -> int:
    """The size of the index of an arena with `num_slots` slots."""
    return HEADER_BYTES + BUCKET * -(-num_slots // int(LOAD * ROWS))


class SharedIndex:
    """The owner's side. Only the owner writes to the region of index_bytes(slots). Raises ValueError for a name that is
    too long."""

    def __init__(self, region: Region, arena: str, slot_bytes: int) -> None:
        name = arena.encode()
        if len(name) > 32:
            raise ValueError(f"the arena's name {arena!r} is longer than 32 bytes")
        self._memory = region.memory
        self._buckets = (region.nbytes - HEADER_BYTES) // BUCKET
        self._memory[: HEADER.size] = HEADER.pack(MAGIC, VERSION, slot_bytes, self._buckets, name)

    def put(self, key: BlockKey, slot: int, length: int, block_checksum: int) -> None:
        """Publish a block that is complete and stays in its slot until `drop`."""
        hashed = xxh3_64_intdigest(key)
        start = HEADER_BYTES + hashed % self._buckets * BUCKET
        for at in range(start, start + BUCKET, ROW.size):
            if self._memory[at : at + ROW.size] == EMPTY:
                self._memory[at : at + ROW.size] = ROW.pack(key, block_checksum ^ hashed, slot, length)
                return

    def drop(self, key: BlockKey) -> None:
        """Call this before anything else is written into the block's slot. Does nothing if the key has no row."""
        start = HEADER_BYTES + xxh3_64_intdigest(key) % self._buckets * BUCKET
        at = _find(self._memory[start : start + BUCKET].tobytes(), key)
        if at >= 0:
            self._memory[start + at : start + at + ROW.size] = EMPTY


class IndexView:
    """Another process's index. Raises ValueError if the region holds none, or one of another version."""

    def __init__(self, region: Region) -> None:
        magic, version, slot_bytes, buckets, name = HEADER.unpack_from(region.memory)
        if (magic, version) != (MAGIC, VERSION) or not 0 < buckets <= (region.nbytes - HEADER_BYTES) // BUCKET:
            raise ValueError(f"region {region.name!r} is not an index of version {VERSION}")
        self.slot_bytes: int = slot_bytes
        self.arena = name.rstrip(b"\0").decode()
        self.address = region.address + HEADER_BYTES  # of the buckets
        self.buckets: int = buckets
        self._memory = region.memory[:]

    def find(self, key: BlockKey) -> Row | None:
        """A snapshot of the row of `key`; it may be outdated or half written."""
        hashed = xxh3_64_intdigest(key)
        start = HEADER_BYTES + hashed % self.buckets * BUCKET
        bucket = self._memory[start : start + BUCKET].tobytes()
        at = _find(bucket, key)
        if at < 0:
            return None
        mixed, slot, length = PLACE.unpack_from(bucket, at + KEY_BYTES)
        return Row(slot, length, mixed ^ hashed) if length else None


def _find(bucket: bytes, key: BlockKey) -> int:
    """The offset at which the row of `key` starts, or -1. (A key of zeros also matches an empty row; the length of 0
    shows that.)"""
    at = bucket.find(key)
    while at >= 0 and at % ROW.size:
        at = bucket.find(key, at + 1)
    return at
