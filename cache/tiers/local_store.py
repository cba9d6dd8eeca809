"""LocalStore: one node's share of the pooled store. DRAM first, SSD behind it.

A block enters in two steps (reserve, commit), because its bytes arrive in between. Once committed it is written behind
to the SSD tier and may leave DRAM only after that, so what was acknowledged is not lost to eviction while the
SSD has room. The SSD tier is inclusive: a block found only there is promoted into DRAM to be read, and hits in DRAM
keep its copy below from aging.

Every block in use has a transfer reference in the pool (`Pin`), taken before the first await, so eviction can't touch
it. One thread writes to SSD and deletes there, in order; reads and syncs that are waited for have threads of their own;
the event loop never waits for the disk. While the disk stands still or fails, what is in DRAM is served, and what is on
SSD only is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cache.arena import UNCHECKED, Arena, checksum
from cache.block import BlockKey
from cache.homes.agreement import Content
from cache.pool.admission import Admission, Always
from cache.pool.block_pool import BlockPool
from cache.pool.policy import PLAIN, EvictionPolicy, Facts
from cache.ssd import New, SsdError, SsdTier
from cache.ssd_reads import ReadModel, SsdPrice, SsdReads
from cache.tiers.group_sync import GroupSync
from cache.tiers.kept import Kept
from cache.tiers.pinning import Pinning
from cache.tiers.promotion import Promotions
from cache.tiers.reservations import NoSpace, Reservations
from cache.tiers.slots import DramSlots, Pin
from cache.tiers.write_behind import Row, WriteBehind
from net.transfer.common.memory import Region

__all__ = ["LocalStore", "NoSpace", "Pin"]

T = TypeVar("T")

BATCH_BYTES = 16 << 20  # written to SSD between two looks at who waits for room
PIN_SHARE = 0.25  # of the blocks that find room here may be kept for ever


class LocalStore:
    """Without an arena it holds nothing and every reservation raises NoSpace. Owns `ssd`, not the arena's region.
    Lives on one event loop. `pin_share`: part of the SSD tier, without one of DRAM, that kept blocks may take;
    `read_model` learns how long reads from SSD take. Raises ValueError when an SSD tier has no DRAM to be read
    through."""

    def __init__(
        self,
        arena: Arena | None,
        ssd: SsdTier | None,
        policy: EvictionPolicy | None = None,
        admission: Admission | None = None,
        pin_share: float = PIN_SHARE,
        read_model: ReadModel | None = None,
    ) -> None:
        if ssd is not None and (arena is None or arena.slot_bytes != ssd.slot_bytes):
            raise ValueError("reads from an SSD tier need DRAM slots of its block size: give --dram-bytes")
        self.arena = arena
        self.ssd = ssd
        self._pool = BlockPool(arena.num_slots if arena is not None else 0, policy)
        self._slots = DramSlots(arena, self._pool)
        chosen: Admission = Always() if admission is None else admission
        self._reads = SsdReads(0 if arena is None else arena.slot_bytes, read_model)
        self._promotions = Promotions(arena, ssd, self._pool, self._slots, self._reads)
        self._behind: WriteBehind | None = None
        if ssd is not None and arena is not None:
            most = max(1, BATCH_BYTES // arena.slot_bytes)
            self._behind = WriteBehind(
                most, partial(self._write, ssd), lambda slot: self._pool.unhold([slot]), self._hold
            )
        self._syncs = None if ssd is None else GroupSync(ssd.sync)
        lasting = ssd.capacity if ssd is not None else self._pool.num_blocks
        self._kept = Kept(int(pin_share * lasting), self._pool, ssd, self.contains, self._mark)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self._counts = counts = dict.fromkeys(("hits", "misses", "writes", "refused", "corrupt"), 0)
        self._pinning = Pinning(self._pool, self._slots, ssd, self._promotions, chosen, self.contains, counts)
        self._reservations = Reservations(
            self._pool, self._slots, self._behind, chosen, self.contains, self._displace, counts
        )

    # --- what is here

    def contains(self, key: BlockKey) -> str | None:
        """The tier that `key` is read from now: 'dram', 'ssd' or None. A reserved block is not here yet, nor is one on
        a disk that cannot be read now."""
        if self._pool.lookup(key) is not None:
            return "dram"
        if self.ssd is not None and self.ssd.readable and (key in self._promotions or self.ssd.contains(key)):
            return "ssd"
        return None

    def ssd_price(self) -> SsdPrice:
        """What it costs now to have blocks read from SSD, behind what is queued there."""
        return self._reads.price()

    def content(self, key: BlockKey) -> Content | None:
        """(checksum, bytes) of what is here under `key`, in any tier."""
        slot = self._pool.lookup(key)
        if slot is not None:
            return self._slots.checksum(slot), self._slots.length(slot)
        return self.ssd.content(key) if self.ssd is not None else None

    def facts(self, key: BlockKey) -> Facts:
        """What is known of a block that is here."""
        slot = self._pool.lookup(key)
        if slot is not None:
            return self._slots.facts(slot)
        return PLAIN if self.ssd is None else self.ssd.facts(key)

    def count_leading(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` that is here."""
        for count, key in enumerate(keys):
            if self.contains(key) is None:
                return count
        return len(keys)

    def keys(self) -> list[BlockKey]:
        """All blocks here, from any tier, each once."""
        above = self._pool.keys()
        if self.ssd is None:
            return above
        known = set(above)
        return above + [key for key in self.ssd.all_keys() if key not in known]

    @property
    def index_region(self) -> Region | None:
        """What readers of this host look blocks up in (cache/store/same_host.py); to be registered with the arena."""
        return self._slots.index_region

    # --- reading

    async def pin(self, keys: Sequence[BlockKey]) -> list[Pin]:
        """The leading run of `keys` that is here, each block with one transfer reference. It ends at a block that is
        missing or damaged, or for which no slot is free to promote it into."""
        pins = await self._pinning.pin_each(keys, leading=True)
        return [pin for pin in pins if pin is not None]

    async def pin_each(self, keys: Sequence[BlockKey], leading: bool = False) -> list[Pin | None]:
        """Pins for `keys`, None for what is missing or damaged; shorter than `keys` when no slot is free to promote
        the next one into. With `leading` it ends before the first that would be None."""
        return await self._pinning.pin_each(keys, leading)

    def at_hand(self, keys: Sequence[BlockKey]) -> list[Pin] | None:
        """All of `keys` when all are in DRAM now, without references: what they name holds until the next await."""
        return self._pinning.at_hand(keys)

    def pin_now(self, keys: Sequence[BlockKey]) -> list[Pin] | None:
        """The same with one transfer reference on each."""
        pins = self._pinning.at_hand(keys)
        if pins is not None:
            self._pool.hold([pin.slot for pin in pins])
        return pins

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Hits of readers that saw the index."""
        self._pinning.used(keys)

    def unpin(self, slots: Sequence[int]) -> None:
        """Give back one reference on each."""
        self._pool.unhold(slots)

    async def verify(self, key: BlockKey) -> bool:
        """Somebody read other bytes than the checksum says: look whether they are wrong here. A damaged block leaves
        DRAM; its copy on SSD, if any, answers from then on."""
        slot = self._pool.lookup(key)
        if slot is None or self.arena is None:
            return False
        memory, wanted = self._slots.memory(slot), self._slots.checksum(slot)
        if wanted == UNCHECKED:
            return True
        self._pool.hold([slot])
        try:
            good = await self._blocking(lambda: checksum(memory)) == wanted
            if not good and self._pool.lookup(key) == slot:
                self._counts["corrupt"] += 1
                self._kept.lost(key)
                self._pool.forget(key)
            return good
        finally:
            self._pool.unhold([slot])

    # --- writing

    def reserve(
        self,
        key: BlockKey,
        facts: Facts | None = None,
        *,
        copy: bool = False,
        keep: bool = False,
        over: bool = False,
    ) -> int | None:
        """A slot to write `key` into, until `commit` or `abandon`. None: it is here, or being written by another, or
        admission refuses it, which it may only when `facts` say that it is KV and could be computed again, and when it
        is no `copy` of what another node has. `keep`: it is to be kept, if the limit allows. With `over` what is here
        is found until the commit, which replaces it. Raises NoSpace; `wait_for_room` may help."""
        return self._reservations.reserve(key, facts, copy=copy, keep=keep, over=over)

    def arriving(self, key: BlockKey) -> bool:
        """A slot is reserved for it now."""
        return self._reservations.arriving(key)

    def commit(self, key: BlockKey, slot: int, block_checksum: int, nbytes: int = -1) -> None:
        """The bytes are in the reserved slot, `nbytes` of them (-1: all of it), 1 at least: found under `key` from now
        on. Raises ValueError without reservation or for an impossible length."""
        if self._reservations.commit(key, slot, block_checksum, nbytes):
            self._kept.keep(key)

    def abandon(self, slot: int) -> None:
        """Give the reservation of `slot` back. Raises KeyError without one."""
        self._reservations.abandon(slot)

    def _displace(self, key: BlockKey) -> bool:
        """Another content is about to be named so; whether this one was kept. On SSD, where one thread works in order,
        it goes ahead of the new one's write."""
        kept = key in self._kept
        self._out_of_dram(key)
        if self.ssd is not None:
            self.ssd.forget([key])
            asyncio.get_running_loop().run_in_executor(self._executor, self.ssd.erase_forgotten, [key])
        return kept

    def _out_of_dram(self, key: BlockKey) -> None:
        self._kept.lost(key)
        self._promotions.drop(key)
        self._pool.forget(key)
        if self._behind is not None:
            self._behind.drop(key)

    async def _write(self, ssd: SsdTier, rows: Sequence[Row]) -> list[bool]:
        blocks = [
            New(key, self._slots.memory(slot), self._slots.checksum(slot), self._slots.facts(slot), key in self._kept)
            for key, slot in rows
        ]
        done = await self._blocking(lambda: ssd.put_many(list(map(_checked, blocks))))  # counts its own failures
        for block, written in zip(blocks, done, strict=True):
            if written and block.kept:
                self._kept.written(block.key)
        return done

    def _hold(self, key: BlockKey) -> int | None:
        slot = self._pool.lookup(key)
        if slot is not None:
            self._pool.hold([slot])
        return slot

    async def remove(self, keys: Sequence[BlockKey]) -> int:
        """Nobody finds `keys` here from now on, in any tier, nor after a restart once this returns; those who read one
        go on. Returns how many were here."""
        here = [key for key in dict.fromkeys(keys) if self._is_anywhere(key)]
        for key in here:
            self._out_of_dram(key)
        ssd = self.ssd
        if ssd is not None and here:
            ssd.forget(here)
            await self._blocking(lambda: ssd.erase_forgotten(here))  # behind the writes that are under way
        return len(here)

    def _is_anywhere(self, key: BlockKey) -> bool:
        """In DRAM or on SSD, readable or not."""
        return self._pool.lookup(key) is not None or (self.ssd is not None and self.ssd.contains(key))

    async def wait_for_room(self, timeout_s: float, facts: Facts = PLAIN) -> bool:
        """Back pressure: wait until a write-behind has freed a slot for such a block. False: time is up, or none is
        under way, or the disk stands still."""
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while not self._pool.has_room_for(facts) and now() < deadline:  # another waiter may have taken what was freed
            if self.ssd is not None and self.ssd.health.writes_stalled:
                break
            if self._behind is None or not await self._behind.batch(deadline - now()):
                break
        return self._pool.has_room_for(facts)

    # --- what lasts

    @property
    def trouble(self) -> str:
        """What is wrong with the disk, in words; empty when nothing is."""
        return "" if self.ssd is None else self.ssd.health.trouble

    async def make_durable(self, keys: Sequence[BlockKey], timeout_s: float) -> list[bool]:
        """Whether each is on SSD, and synced there, before time is up. Without an SSD tier none is."""
        if self.ssd is None or self._behind is None or self._syncs is None:
            return [False] * len(keys)
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        await self._reservations.settled(keys, timeout_s)  # somebody else may be writing one
        self._behind.want([key for key in keys if not self.ssd.is_durable(key)])
        await self._behind.through(keys, deadline - now())
        synced = await self._syncs.synced(max(0.0, deadline - now()))
        return [synced and self.ssd.is_durable(key) for key in keys]

    async def flush(self, timeout_s: float = float("inf")) -> None:
        """Until what is committed now is on SSD and synced there. Without an SSD tier there is nothing to do. Raises
        SsdError when the disk does not take it in time."""
        if self._behind is None:
            return
        pending = self._behind.pending()
        there = [key for key in pending if self._pool.lookup(key) is not None]
        good = await self.make_durable(there, min(timeout_s, 1e9))
        synced = bool(there) or (self._syncs is not None and await self._syncs.synced(min(timeout_s, 1e9)))
        gone = [key for key, durable in zip(there, good, strict=True) if not durable and self._is_anywhere(key)]
        if gone or not synced:
            why = self.trouble or "the disk does not answer"
            raise SsdError(f"{len(gone)} blocks are not safe on SSD: {why}; look at the disk of --ssd-path")

    def keep(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Never evict these; True for each that is kept, False beyond the limit, None for what is not here."""
        return [self._kept.keep(key) if self._is_anywhere(key) else None for key in keys]

    def give_up(self, keys: Sequence[BlockKey]) -> int:
        """They may be evicted again; how many were kept."""
        return sum(map(self._kept.give_up, keys))

    def is_kept(self, key: BlockKey) -> bool:
        return key in self._kept

    async def _mark(self, key: BlockKey, kept: bool) -> bool:
        ssd = self.ssd
        return ssd is not None and await self._blocking(lambda: ssd.keep(key, kept))

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # --- accounts and life

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per tier: hits, misses, writes, evictions, corrupt, blocks, bytes. A miss in DRAM may be a hit on SSD; DRAM
        also counts the blocks that admission refused, SSD the bytes that are to be read, how long one
        waits for them, and how long each block takes."""
        usage = self._pool.usage()
        slot_bytes = self.arena.slot_bytes if self.arena is not None else 0
        dram = self._counts | {
            "blocks": usage["named"],
            "bytes": usage["named"] * slot_bytes,
            "capacity": usage["total"],
            "evictions": usage["evictions"],
            "held": usage["held"],
            "reserved": len(self._reservations),
            "pinned": len(self._kept),
            "pinned_most": self._kept.limit,
            "unwritten": 0 if self._behind is None else self._behind.owed,
        }
        if self.ssd is None:
            return {"dram": dram}
        price = self._reads.price()
        reads = {"queued_bytes": self._reads.queued_bytes, "wait_s": price.fixed_s, "block_s": price.block_s}
        return {"dram": dram, "ssd": self.ssd.stats() | reads}

    def check_integrity(self) -> None:
        """Raises IntegrityError when the books of the DRAM tier disagree."""
        self._pool.check_integrity()

    async def drain(self) -> None:
        """Until all promotions and writes to SSD that are under way now are done."""
        writing = self._behind.task if self._behind is not None else None
        tasks = [*([writing] if writing else []), *self._promotions.tasks()]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Finish what is under way, then close the SSD tier; the arena may go afterwards. Idempotent."""
        await self.drain()
        if self._behind is not None:
            self._behind.close()
        await self._kept.close()
        if self._syncs is not None:
            await self._syncs.close()
        if self.ssd is not None:
            await asyncio.to_thread(self.ssd.close)
        self._promotions.close()
        self._executor.shutdown(wait=True)
        self._slots.close()


def _checked(row: New) -> New:
    """On SSD every block has a checksum, which is taken at the latest here."""
    return row._replace(checksum=checksum(row.memory)) if row.checksum == UNCHECKED else row
