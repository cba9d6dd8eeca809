"""LocalStore: one node's share of the pooled store. DRAM first, SSD behind it.

A block enters in two steps (reserve, commit), because its bytes arrive in between. Once committed it is written behind
to the SSD tier and may leave DRAM only after that, so eviction loses no acknowledged block while the SSD has room. The
SSD tier is inclusive: a block found only there is promoted into DRAM to be read, and hits in DRAM keep its copy below
from aging.

`reservations` has the slots that are being written, and `pinning` the blocks that are being read: each has a transfer
reference in the pool (`Pin`), taken before the first await, so it is not evicted. One thread writes to SSD and deletes
there, in order; reads and syncs run in other threads; the event loop never waits for the disk. While the disk hangs or
fails, blocks in DRAM are served, and blocks that are only on SSD are misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cache.arena import UNCHECKED, Arena, checksum
from cache.block import BlockKey
from cache.homes.agreement import Content
from cache.pool.admission import Admission, Always
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.pool.policy import OBJECTS, PLAIN, EvictionPolicy, Facts
from cache.ssd import New, SsdError, SsdTier
from cache.ssd_reads import ReadModel, SsdPrice, SsdReads
from cache.tiers.group_sync import GroupSync
from cache.tiers.inspection import Inspection
from cache.tiers.kept import Kept
from cache.tiers.lodging import Lodging, SsdLodging, most_lodged
from cache.tiers.pinning import Pinning
from cache.tiers.promotion import Promotions
from cache.tiers.reservations import NoSpace, QuotaReached, Reservations
from cache.tiers.slots import DramSlots, Pin
from cache.tiers.usage import DRAM, SSD, Usage
from cache.tiers.write_behind import Row, WriteBehind
from net.transfer.common.memory import Region

__all__ = ["LocalStore", "NoSpace", "Pin", "QuotaReached"]

T = TypeVar("T")

BATCH_BYTES = 16 << 20  # maximum bytes per write to SSD; slots become free after each
ERASE_WAIT_S = 1.0  # a removal waits this long for the disk
CLEAR_BATCH = 512  # blocks removed in one turn of the event loop
NEARLY_FULL = 0.95
PIN_SHARE = 0.25  # maximum share of the blocks that may be pinned


class LocalStore:
    """Without an arena it holds nothing and every reservation raises NoSpace. Owns `ssd`, not the arena's region. Use
    it on one event loop. `pin_share`: share of the SSD tier, or of DRAM without one, that kept blocks may take;
    `read_model` learns how long reads from SSD take; `usage` counts the blocks of each tenant. Raises ValueError when
    there is an SSD tier but no DRAM to read it through."""

    def __init__(
        self,
        arena: Arena | None,
        ssd: SsdTier | None,
        policy: EvictionPolicy | None = None,
        admission: Admission | None = None,
        pin_share: float = PIN_SHARE,
        read_model: ReadModel | None = None,
        usage: Usage | None = None,
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
        self._counts = counts = dict.fromkeys(("hits", "misses", "corrupt"), 0)
        self.inspection = Inspection(self.verify)
        self.pinning = Pinning(self._pool, self._slots, ssd, self._promotions, chosen, self.readable, counts)
        self.reservations = Reservations(
            self._pool, self._slots, self._behind, chosen, self.contains, self._displace, usage
        )
        self._usage = usage
        if usage is not None:
            self._pool.watch(usage.watcher(DRAM))
            if ssd is not None:
                ssd.watch(usage.watcher(SSD))

    # --- queries

    def contains(self, key: BlockKey) -> str | None:
        """The tier that `key` is read from now: 'dram', 'ssd' or None. A reserved block is not here yet, nor is one on
        a disk that cannot be read now."""
        if self._pool.lookup(key) is not None:
            return "dram"
        if self.ssd is not None and self.ssd.readable and (key in self._promotions or self.ssd.contains(key)):
            return "ssd"
        return None

    def readable(self, key: BlockKey) -> str | None:
        """The tier that readers get `key` from: `contains`, but None while a report of damage is inspected."""
        return None if key in self.inspection else self.contains(key)

    def ssd_price(self) -> SsdPrice:
        """The present cost of reading blocks from SSD, after the reads already queued."""
        return self._reads.price()

    def content(self, key: BlockKey) -> Content | None:
        """(checksum, bytes) of the local block, in any tier; None if there is none."""
        slot = self._pool.lookup(key)
        if slot is not None:
            return self._slots.checksum(slot), self._slots.length(slot)
        return self.ssd.content(key) if self.ssd is not None else None

    def facts(self, key: BlockKey) -> Facts:
        """The facts of a block that is here."""
        slot = self._pool.lookup(key)
        if slot is not None:
            return self._slots.facts(slot)
        return PLAIN if self.ssd is None else self.ssd.facts(key)

    def count_leading(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` that is readable."""
        for count, key in enumerate(keys):
            if self.readable(key) is None:
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
    def has_quotas(self) -> bool:
        """Whether tenants may have only so much here (--tenants)."""
        return self._usage is not None

    @property
    def index_region(self) -> Region | None:
        """The index in which readers on this host find blocks (cache/store/same_host.py); register it with the
        arena."""
        return self._slots.index_region

    # --- reading

    async def verify(self, key: BlockKey) -> bool:
        """A reader found a wrong checksum: check the block here. A damaged block is dropped from DRAM; then its copy on
        SSD, if any, is used."""
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

    @property
    def most_lodged(self) -> int:
        """Number of blocks that one lodging may have in DRAM."""
        return most_lodged(self._pool.num_blocks)

    @property
    def most_on_ssd(self) -> int:
        """Number of blocks that one lodging may have on SSD."""
        return 0 if self.ssd is None else most_lodged(self.ssd.capacity)

    def lodge_on_ssd(self) -> SsdLodging:
        """Room on SSD. Raises SsdError without an SSD tier."""
        if self.ssd is None:
            raise SsdError("this node has no SSD tier: give --ssd-path")
        return SsdLodging(self.ssd, self._executor)

    async def lodge(self, keys: Sequence[BlockKey], count: int, facts: Facts = PLAIN) -> Lodging:
        """Room for `count` blocks until their owner gives it up: the leading run of `keys` that is here (at most
        `count`), and slots for the others, whose blocks will have these facts. Raises NoSpace."""
        if count > self.most_lodged:
            raise NoSpace(f"{count} blocks exceed the {self.most_lodged} that one owner may have")
        found = [pin.slot for pin in await self.pinning.pin_each(keys[:count], leading=True) if pin is not None]
        fresh: list[int] = []
        try:
            for _ in range(count - len(found)):
                fresh.append(self._pool.allocate_for(facts))
        except OutOfBlocks:
            self._pool.unhold(found)
            self._pool.release(fresh)
            more = count - len(found) - len(fresh)
            raise NoSpace(f"{more} of {count} blocks have no slot: others read, write or keep them") from None
        return Lodging(self._pool, self.reservations.enter, found, fresh)

    # --- sessions (cache/sessions/)

    def put_aside(self, rows: Iterable[tuple[BlockKey, float]]) -> None:
        """DRAM evicts these blocks first; rows: (key, time at which it is wanted)."""
        self._pool.put_aside(rows)

    @property
    def num_evictions(self) -> int:
        """Blocks that DRAM has evicted so far."""
        return self._pool.num_evictions

    @property
    def is_nearly_full(self) -> bool:
        """Whether new blocks will soon replace others: on SSD, or in DRAM without one."""
        if self.ssd is not None:
            return self.ssd.num_blocks >= NEARLY_FULL * self.ssd.capacity
        usage = self._pool.usage()
        return usage["free"] <= (1 - NEARLY_FULL) * usage["total"]

    @property
    def num_unwanted(self) -> int:
        """Blocks of DRAM that are free, or that it evicts first."""
        return self._pool.num_unwanted

    @property
    def num_aside(self) -> int:
        """Blocks that DRAM evicts first."""
        return self._pool.num_aside

    def touch(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """These will be read soon: DRAM keeps those that it has. Returns the others."""
        slots = list(map(self._pool.lookup, keys))
        self._pool.touch([slot for slot in slots if slot is not None])
        return [key for key, slot in zip(keys, slots, strict=True) if slot is None]

    def bring_up(self, keys: Sequence[BlockKey], most: int) -> tuple[int, int]:
        """These will be read soon: DRAM keeps those that it has, and those on SSD are read into it, while no more than
        `most` reads run. Returns (leading keys that this is true of now, reads that began)."""
        reads = 0
        for count, key in enumerate(keys):
            if (slot := self._pool.lookup(key)) is not None:
                self._pool.touch([slot])
            elif self.readable(key) == "ssd" and key not in self._promotions:
                if len(self._promotions.tasks()) >= most:
                    return count, reads
                reads += self._promotions.of(key) is not None
        return len(keys), reads

    # --- writing

    def commit(self, key: BlockKey, slot: int, block_checksum: int, nbytes: int = -1, *, over: bool = False) -> bool:
        """The reserved slot has `nbytes` bytes, at least 1 (-1: the whole slot): readers find the block from now on.
        Returns False if another one has come meanwhile: it stays, unless `over`. Raises ValueError without a
        reservation or for an impossible length."""
        entered, keep = self.reservations.commit(key, slot, block_checksum, nbytes, over=over)
        if keep:
            self._kept.keep(key)
        return entered

    def enter_lent(self, key: BlockKey, slot: int, block_checksum: int, nbytes: int) -> bool:
        """The same for a lent slot (Reservations.enter_lent)."""
        entered, keep = self.reservations.enter_lent(key, slot, block_checksum, nbytes)
        if keep:
            self._kept.keep(key)
        return entered

    def _displace(self, key: BlockKey, unless: Content | None) -> bool:
        """Remove the block before another content replaces it, unless its content is that one; returns whether it was
        kept. One thread works on the SSD in order, so the removal there precedes the new write."""
        if unless is not None and self.content(key) in (None, unless):
            return False
        kept = key in self._kept
        self._out_of_dram(key)
        if self.ssd is not None:
            self.ssd.forget([key])
            self._erase(self.ssd, [key])
        return kept

    def _erase(self, ssd: SsdTier, keys: Sequence[BlockKey]) -> asyncio.Future[None]:
        """Erase forgotten blocks, after the running writes. To be waited for, not awaited: if it were cancelled, these
        keys would stay forgotten."""
        return asyncio.get_running_loop().run_in_executor(self._executor, ssd.erase_forgotten, keys)

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

    async def remove(self, keys: Sequence[BlockKey], patience_s: float = ERASE_WAIT_S) -> int:
        """Remove `keys` from all tiers. Running reads continue. Once this returns, the blocks are also erased on disk,
        so that a restart does not find them, unless the disk took longer than `patience_s` or hangs: then they are
        erased when it answers. Returns the number of removed blocks."""
        here = [key for key in dict.fromkeys(keys) if self._is_anywhere(key)]
        for key in here:
            self._out_of_dram(key)
        ssd = self.ssd
        if ssd is not None and here:
            ssd.forget(here)
            erased = self._erase(ssd, here)
            if not ssd.health.writes_stalled:
                await asyncio.wait([erased], timeout=patience_s)
        return len(here)

    async def clear(self) -> int:
        """Remove all blocks from all tiers, except kept ones and those that programs stored. Returns the number of
        removed blocks."""
        removed = 0
        programs = OBJECTS.service_class
        keys = [key for key in self.keys() if key not in self._kept and self.facts(key).service_class != programs]
        for start in range(0, len(keys), CLEAR_BATCH):
            removed += await self.remove(keys[start : start + CLEAR_BATCH])
            await asyncio.sleep(0)
        return removed

    def _is_anywhere(self, key: BlockKey) -> bool:
        """Whether the block is in DRAM or on SSD, readable or not."""
        return self._pool.lookup(key) is not None or (self.ssd is not None and self.ssd.contains(key))

    async def wait_for_room(self, timeout_s: float, facts: Facts = PLAIN) -> bool:
        """Back pressure: wait until a write-behind frees a slot for a block with these facts. Returns False if time is
        up, no write is running, or the disk hangs."""
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while not self._pool.has_room_for(facts) and now() < deadline:  # another waiter may have taken the free slot
            if self.ssd is not None and self.ssd.health.writes_stalled:
                break
            if self._behind is None or not await self._behind.batch(deadline - now()):
                break
        return self._pool.has_room_for(facts)

    # --- durability

    @property
    def trouble(self) -> str:
        """The disk's present failure as text; empty if there is none."""
        return "" if self.ssd is None else self.ssd.health.trouble

    async def make_durable(self, keys: Sequence[BlockKey], timeout_s: float) -> list[bool]:
        """For each block, whether it is synced on SSD within `timeout_s`. Without an SSD tier, none is."""
        if self.ssd is None or self._behind is None or self._syncs is None:
            return [False] * len(keys)
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        await self.reservations.settled(keys, timeout_s)  # another writer may be writing one
        unsafe = [key for key in keys if not self.ssd.is_durable(key)]
        self._behind.want(unsafe)
        below = [key for key in unsafe if self._pool.lookup(key) is None and self.ssd.contains(key)]
        await self._write_again(self.ssd, self._behind, below, deadline)
        await self._behind.through(keys, deadline - now())
        synced = await self._syncs.synced(max(0.0, deadline - now()))
        return [synced and self.ssd.is_durable(key) for key in keys]

    async def _write_again(self, ssd: SsdTier, behind: WriteBehind, keys: Sequence[BlockKey], deadline: float) -> None:
        """Read blocks that are only on SSD, and queue them to be written there again, because a sync after their write
        has failed."""
        now, most = asyncio.get_running_loop().time, max(1, BATCH_BYTES // ssd.slot_bytes)
        while keys and now() < deadline:
            pins = await self.pinning.pin_each(keys[:most])
            if not pins and await self.wait_for_room(deadline - now(), ssd.facts(keys[0])):
                pins = await self.pinning.pin_each(keys[:most])
            if not pins:
                return
            here = [(key, pin.slot) for key, pin in zip(keys, pins, strict=False) if pin is not None]
            behind.want(key for key, _ in here)
            self.pinning.unpin([slot for _, slot in here])
            keys = keys[len(pins) :]

    async def flush(self, timeout_s: float = float("inf")) -> None:
        """Wait until all committed blocks are synced to SSD. Without an SSD tier this does nothing. Raises SsdError if
        the disk is too slow or fails."""
        if self._behind is None or self.ssd is None or self._syncs is None:
            return
        pending = [key for key in self._behind.pending() if self._pool.lookup(key) is not None]
        doubtful, damaged = self.ssd.doubtful_keys(), self.ssd.stats()["corrupt"]
        there = list(dict.fromkeys(pending + doubtful))
        good = await self.make_durable(there, min(timeout_s, 1e9))
        synced = bool(there) or await self._syncs.synced(min(timeout_s, 1e9))
        gone = {key for key, durable in zip(there, good, strict=True) if not durable and self._is_anywhere(key)}
        gone.update(self.ssd.doubtful_keys())  # a sync in the background has failed meanwhile
        lost = self.ssd.stats()["corrupt"] - damaged if doubtful else 0
        if gone or lost or not synced:
            why = self.trouble or ("some were damaged" if lost else "the disk does not answer")
            raise SsdError(f"{len(gone) + lost} blocks are not safe on SSD: {why}; look at the disk of --ssd-path")

    def keep(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Keep these blocks. Returns True for each kept block, False beyond the limit, None if the block is not
        here."""
        return [self._kept.keep(key) if self._is_anywhere(key) else None for key in keys]

    def give_up(self, keys: Sequence[BlockKey]) -> int:
        """Let these blocks be evicted again. Returns the number that were kept."""
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
        also counts the blocks that admission refused. SSD also has the bytes queued for reading, the time to wait for
        them, and the time per block."""
        usage = self._pool.usage()
        slot_bytes = self.arena.slot_bytes if self.arena is not None else 0
        dram = (
            self._counts
            | self.reservations.counts
            | {
                "blocks": usage["named"],
                "bytes": usage["named"] * slot_bytes,
                "capacity": usage["total"],
                "evictions": usage["evictions"],
                "held": usage["held"],
                "reserved": len(self.reservations),
                "pinned": len(self._kept),
                "pinned_most": self._kept.limit,
                "unwritten": 0 if self._behind is None else self._behind.owed,
            }
        )
        if self.ssd is None:
            return {"dram": dram}
        price = self._reads.price()
        reads = {"queued_bytes": self._reads.queued_bytes, "wait_s": price.fixed_s, "block_s": price.block_s}
        return {"dram": dram, "ssd": self.ssd.stats() | reads}

    def tenants(self) -> dict[str, dict[str, int | None]]:
        """Usage.stats; empty if no tenant is named."""
        return {} if self._usage is None else self._usage.stats()

    def check_integrity(self) -> None:
        """Raises IntegrityError if the DRAM tier's data structures are inconsistent."""
        self._pool.check_integrity()

    async def drain(self) -> None:
        """Wait until all running promotions and writes to SSD are done."""
        writing = self._behind.task if self._behind is not None else None
        tasks = [*([writing] if writing else []), *self._promotions.tasks()]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Finish all running work, then close the SSD tier; the arena may be released afterwards. Idempotent."""
        await self.inspection.close()
        await self.drain()
        if self._behind is not None:
            self._behind.close()
        await self._kept.close()
        if self._syncs is not None:
            await self._syncs.close()
        if self.ssd is not None:
            await asyncio.to_thread(self._executor.shutdown)  # after the writes of lodgings, for which nobody waits
            await asyncio.to_thread(self.ssd.close)
        self._promotions.close()
        self._executor.shutdown()
        self._slots.close()


def _checked(row: New) -> New:
    """Compute the checksum if it is missing: on SSD every block has one."""
    return row._replace(checksum=checksum(row.memory)) if row.checksum == UNCHECKED else row
