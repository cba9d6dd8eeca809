"""Usage: the blocks of each tenant in one node's share of the pool, and which tenant has reached its quota.

A block counts once, whichever of the tiers have it, and from its reservation on. It counts as a whole slot, which is
what it takes of the DRAM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from cache.block import BlockKey
from cache.tenants import SPACE_BYTES, spaces

COMING, DRAM, SSD = 1, 2, 4
OTHER = "other"
"""All keys of no tenant that is named."""


class Usage:
    """`tenants`: the bytes that each may have here; None: any number. Raises ValueError for a quota below one slot. The
    SSD tier's threads report too, so a lock guards the counts."""

    def __init__(self, tenants: Mapping[str, int | None], slot_bytes: int) -> None:
        for name, quota in tenants.items():
            if quota is not None and quota < slot_bytes:
                raise ValueError(f"{name}={quota} is less than a block of {slot_bytes} bytes, so nothing would fit")
        self._quotas = dict(tenants)
        self._slot_bytes = slot_bytes
        self._tenant_of = {space: name for name in tenants for space in spaces(name)}
        self._lock = threading.Lock()
        self._where: dict[BlockKey, int] = {}  # the places that have the block, as a sum of the constants above
        self._blocks = dict.fromkeys((*tenants, OTHER), 0)
        self._refused = dict.fromkeys(tenants, 0)

    def watcher(self, place: int) -> Callable[[BlockKey, bool], None]:
        """changed(key, here), for the owner of that place."""
        return lambda key, here: self.changed(place, key, here)

    def changed(self, place: int, key: BlockKey, here: bool) -> None:
        """The block is in that place now, or not any more."""
        with self._lock:
            before = self._where.get(key, 0)
            after = before | place if here else before & ~place
            if after:
                self._where[key] = after
            else:
                self._where.pop(key, None)
            if bool(before) != bool(after):
                self._blocks[self._owner(key)] += 1 if after else -1

    def refuses(self, key: BlockKey) -> bool:
        """Whether a new block would exceed its tenant's quota. Counts the refusal."""
        owner = self._owner(key)
        quota = self._quotas.get(owner)
        with self._lock:
            if quota is None or key in self._where or (self._blocks[owner] + 1) * self._slot_bytes <= quota:
                return False
            self._refused[owner] += 1
            return True

    def _owner(self, key: BlockKey) -> str:
        return self._tenant_of.get(key[:SPACE_BYTES], OTHER)

    def stats(self) -> dict[str, dict[str, int | None]]:
        """Per tenant, and for OTHER: bytes; quota in bytes, or None; blocks refused."""
        with self._lock:
            return {
                name: {
                    "bytes": blocks * self._slot_bytes,
                    "quota": self._quotas.get(name),
                    "refused": self._refused.get(name, 0),
                }
                for name, blocks in self._blocks.items()
            }
