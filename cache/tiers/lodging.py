"""Lodging: slots of a LocalStore's DRAM whose blocks stay until their owner gives them up.

A block of the store may be evicted at any time, and a reservation ends with its commit. An owner that needs blocks for
longer, because it computes with them, takes a lodging: blocks that are already here are held, and the others get slots
that the owner fills when it likes. What it has filled can be named; then everybody finds it, like any block of the
store, and once the lodging ends it may be evicted like any other. Nothing of a lodging outlives the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache.block import BlockKey
from cache.pool.block_pool import BlockPool
from cache.pool.policy import Facts

LODGED_SHARE = 0.75
"""Maximum share of the DRAM slots that one owner may take; the rest goes on serving the pool."""


def most_lodged(slots: int) -> int:
    """Number of `slots` slots that one lodging may have."""
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
