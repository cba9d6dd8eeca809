"""Reservations: slots whose blocks are being written. A block enters in two steps, and its bytes arrive in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from cache.block import BlockKey
from cache.homes.agreement import Content
from cache.pool.admission import Admission
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.pool.policy import OBJECTS, PLAIN, Facts
from cache.tiers.slots import DramSlots
from cache.tiers.usage import COMING, Usage
from cache.tiers.write_behind import WriteBehind


class NoSpace(Exception):
    """Every slot is in use, reserved, or waiting for its write to SSD."""


class QuotaReached(Exception):
    """The tenant of the block has as much as it may have here (--tenants)."""


class Reservations:
    """Reservations in the DRAM of a LocalStore. `tier_of(key)`: the tier of a block, or None. `displace(key, unless)`
    removes the content that is about to be replaced, unless it equals that one, and returns whether it was kept. A
    block on a disk that cannot be read has no tier, but it comes back with the disk: a block that is put in its place
    displaces it."""

    def __init__(
        self,
        pool: BlockPool,
        slots: DramSlots,
        behind: WriteBehind | None,
        admission: Admission,
        tier_of: Callable[[BlockKey], str | None],
        displace: Callable[[BlockKey, Content | None], bool],
        usage: Usage | None = None,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._behind = behind
        self._admission = admission
        self._tier_of = tier_of
        self._displace = displace
        self.counts = {"writes": 0, "refused": 0}  # blocks written, and blocks that admission refused
        self._usage = usage
        self._reserved: dict[int, tuple[BlockKey, Facts, bool, bool]] = {}  # with `keep` and `over` of `reserve`
        self._incoming: set[BlockKey] = set()  # the keys in _reserved
        self._lent: set[int] = set()
        self._ended: asyncio.Event | None = None  # set when the next reservation ends, if somebody waits for that

    def __len__(self) -> int:
        return len(self._reserved)

    def arriving(self, key: BlockKey) -> bool:
        """Whether the block is being written."""
        return key in self._incoming

    def reserve(
        self,
        key: BlockKey,
        facts: Facts | None = None,
        *,
        copy: bool = False,
        keep: bool = False,
        over: bool = False,
    ) -> int | None:
        """A slot to write `key` into, until `commit` or `abandon`. Returns None if the block is here, is being written,
        or is refused by admission. Admission may refuse only KV that can be recomputed (it has `facts`), and no `copy`
        of another node's block. `keep`: the value that `commit` will return. With `over`, the present block stays until
        the commit replaces it. Raises NoSpace; `wait_for_room` may help. Raises QuotaReached, but not for a `copy`: the
        put of that block was acknowledged."""
        self._admission.wanted(key)
        if key in self._incoming or (not over and self._tier_of(key) is not None):
            return None
        if self._usage is not None and not copy and self._usage.refuses(key):
            raise QuotaReached
        refusable = facts is not None and facts.service_class != OBJECTS.service_class and not copy
        victim = self._pool.next_victim(facts) if facts is not None and refusable else None
        if facts is not None and victim is not None and not self._admission.admits(key, facts, victim):
            self.counts["refused"] += 1
            return None
        try:
            slot = self._pool.allocate_for(facts or PLAIN)
        except OutOfBlocks as error:
            raise NoSpace(str(error)) from None
        self._reserved[slot] = (key, facts or PLAIN, keep, over)
        self._incoming.add(key)
        if self._usage is not None:
            self._usage.changed(COMING, key, True)
        return slot

    def commit(
        self, key: BlockKey, slot: int, block_checksum: int, nbytes: int = -1, *, over: bool = False
    ) -> tuple[bool, bool]:
        """The reserved slot has `nbytes` bytes, at least 1 (-1: the whole slot): readers find the block from now on,
        unless another one was lent and filled meanwhile and stays (not with `over`). Returns whether the block is here
        now, and whether to keep what is here: `keep` of the reservation, or because a replaced block was kept. Raises
        ValueError without a reservation or for an impossible length."""
        reserved, facts, keep, replaces = self._reserved.get(slot, (None, PLAIN, False, False))
        if reserved != key:
            raise ValueError(f"slot {slot} is not reserved for block {key.hex()}")
        length = self._slots.slot_bytes if nbytes == -1 else nbytes
        if not 0 < length <= self._slots.slot_bytes:
            raise ValueError(f"a block of {length} bytes does not fit a slot of {self._slots.slot_bytes}")
        enters = over or replaces or self._tier_of(key) is None
        if enters:
            keep = self._displace(key, None if over or replaces else (block_checksum, length)) or keep
            self._enter(key, slot, block_checksum, length, facts)
        self.abandon(slot)
        return enters, keep

    def enter(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> bool:
        """A slot that its owner has allocated (cache/tiers/lodging.py) has the whole block of `key`: readers find it
        from now on. Returns False if the block is here or being written; then the slot stays unnamed."""
        if key in self._incoming or self._tier_of(key) is not None:
            return False
        self._enter(key, slot, block_checksum, self._slots.slot_bytes, facts)
        return True

    # --- lent slots (cache/server/lending.py)

    def lend(self) -> int:
        """A slot for a named value that is not known yet, until `take_back`. Raises NoSpace."""
        try:
            slot = self._pool.allocate_for(OBJECTS)
        except OutOfBlocks as error:
            raise NoSpace(str(error)) from None
        self._lent.add(slot)
        return slot

    def take_back(self, slot: int) -> None:
        """The slot is lent no more. Raises KeyError if it was not."""
        self._lent.remove(slot)
        self._pool.release([slot])

    def enter_lent(self, key: BlockKey, slot: int, block_checksum: int, nbytes: int) -> tuple[bool, bool]:
        """A lent slot has the block of `key`, `nbytes` long: readers find it from now on, unless the block is here. Its
        put is done, so it comes before one that still arrives. Returns the same as `commit`. Raises ValueError for an
        impossible length or a slot that is not lent."""
        if slot not in self._lent or not 0 < nbytes <= self._slots.slot_bytes:
            raise ValueError(f"slot {slot} is not lent for a block of {nbytes} bytes")
        self._admission.wanted(key)
        if self._tier_of(key) is not None:
            return False, False
        keep = self._displace(key, (block_checksum, nbytes))
        self._enter(key, slot, block_checksum, nbytes, OBJECTS)
        return True, keep

    def _enter(self, key: BlockKey, slot: int, block_checksum: int, length: int, facts: Facts) -> None:
        self._slots.fill(slot, block_checksum, length, facts)
        self._pool.name(slot, key, facts)
        self.counts["writes"] += 1
        if self._behind is not None:
            self._pool.hold([slot])
            self._behind.add(key, slot)

    def abandon(self, slot: int) -> None:
        """Release the reservation of `slot`. Raises KeyError without one."""
        key = self._reserved.pop(slot)[0]
        self._incoming.remove(key)
        if self._usage is not None:
            self._usage.changed(COMING, key, False)
        self._pool.release([slot])
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    async def settled(self, keys: Iterable[BlockKey], timeout_s: float) -> None:
        """Wait until none of these blocks is being written, or `timeout_s` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._incoming.isdisjoint(keys):
                    self._ended = self._ended or asyncio.Event()
                    await self._ended.wait()
