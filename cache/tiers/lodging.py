"""Lodging: slots in the DRAM of a LocalStore, and blocks on its SSD, that stay until their owner gives them up.

A block of the store may be evicted at any time, and a reservation ends with its commit. An owner that needs blocks for
longer, because it computes with them, takes a lodging: blocks that are already here are held, and the others get slots
that the owner fills when it likes. What it has filled can be named; then everybody finds it, like any block of the
store, and once the lodging ends it may be evicted like any other. Nothing of a lodging outlives the process.

Blocks on SSD have no slot: the owner writes them whole, and reads parts of them where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Protocol

from cache.arena import Buffer
from cache.block import BlockKey
from cache.pool.block_pool import BlockPool
from cache.pool.policy import Facts
from cache.ssd import SsdError, SsdTier
from cache.ssd.medium import Entry

LODGED_SHARE = 0.75
"""Maximum share of a tier that one owner may take; the rest goes on serving the pool."""


def most_lodged(slots: int) -> int:
    """Number of `slots` blocks of a tier that one lodging may have."""
    return int(LODGED_SHARE * slots)


class Enter(Protocol):
    """Makes a filled slot of the owner a block of the store (Reservations.enter)."""

    def __call__(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> bool:
        """Returns False if the store has the key already."""


class Lodging:
    """`found`: slots of blocks that were here, one transfer reference each. `fresh`: allocated slots to fill."""

    def __init__(self, pool: BlockPool, enter: Enter, found: Sequence[int], fresh: Sequence[int]) -> None:
        self.found, self.fresh = list(found), list(fresh)
        self._pool, self._enter = pool, enter
        self._closed = False

    def name(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> bool:
        """A fresh slot has the whole block of `key` now. Returns False if the store has another copy; this one stays
        unnamed."""
        return self._enter(key, slot, block_checksum, facts)

    def close(self) -> None:
        """Give everything up. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.unhold(self.found)
            self._pool.release(self.fresh)


class SsdLodging:
    """Blocks on SSD. `executor`: the tier's thread for writing. `take` and `read` block; any thread but that of the
    event loop may call them. Any thread may call `put`."""

    def __init__(self, ssd: SsdTier, executor: Executor) -> None:
        self._ssd, self._executor = ssd, executor
        self._held: list[BlockKey] = []
        self._closed = False
        self._lock = Lock()  # of these two

    def put(self, key: BlockKey, memory: Buffer, block_checksum: int, facts: Facts) -> Future[Entry]:
        """Write a whole block behind the tier's other writes, if its key is not there already; the entry tells which
        content the tier has. The memory must not change until then. The future raises SsdError if the disk is full or
        fails."""
        return self._executor.submit(self._put, key, memory, block_checksum, facts)

    def _put(self, key: BlockKey, memory: Buffer, block_checksum: int, facts: Facts) -> Entry:
        found = self._hold(key) if self._ssd.put(key, memory, block_checksum, facts) else None
        if found is None:
            raise SsdError(self._ssd.health.trouble or f"the SSD tier {self._ssd.directory} is full: raise --ssd-bytes")
        return found

    def take(self, key: BlockKey, into: Buffer) -> Entry | None:
        """A block that is there: copy it whole, and verify it. None if it is not there or damaged."""
        entry = self._hold(key)
        return None if entry is None or self._ssd.get(key, into) is None else entry

    def _hold(self, key: BlockKey) -> Entry | None:
        entry = self._ssd.hold(key)
        if entry is None:
            return None
        with self._lock:
            if not self._closed:
                self._held.append(key)
                return entry
        self._ssd.unhold([key])  # a block that was still to be written when its owner gave it up
        return None

    def read(self, entry: Entry, begin: int, into: memoryview) -> None:
        """See SsdTier.read_part. Raises OSError."""
        self._ssd.read_part(entry, begin, into)

    def close(self) -> None:
        """Give everything up, what is still to be written included. Idempotent. No `take` or `read` is under way."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, []
        self._ssd.unhold(held)
