"""Pinning: holds blocks of a LocalStore in place while they are read.

A pin is a transfer reference, taken before the first await, so the block is not evicted; a block that is only on SSD is
promoted into DRAM first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cache.block import BlockKey
from cache.pool.admission import Admission
from cache.pool.block_pool import BlockPool
from cache.ssd import SsdTier
from cache.tiers.promotion import Promotions
from cache.tiers.slots import DramSlots, Pin

DISK_CHECK_INTERVAL_S = 0.25  # between two checks whether the disk still answers


class Pinning:
    """`tier_of(key)`: the tier that readers get a block from, or None, also while a report of damage is inspected.
    `counts` receives hits and misses of DRAM."""

    def __init__(
        self,
        pool: BlockPool,
        slots: DramSlots,
        ssd: SsdTier | None,
        promotions: Promotions,
        admission: Admission,
        tier_of: Callable[[BlockKey], str | None],
        counts: dict[str, int],
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._ssd = ssd
        self._promotions = promotions
        self._admission = admission
        self._tier_of = tier_of
        self._counts = counts

    def at_hand(self, keys: Sequence[BlockKey]) -> list[Pin] | None:
        """Pins of all `keys` if all are in DRAM now, otherwise None. They take no references, so they are valid only
        until the next await."""
        slots = []
        for slot in map(self._slot, keys):
            if slot is None:
                return None
            slots.append(slot)
        self.used(keys)
        return [self._slots.pin(slot, "dram") for slot in slots]

    def _slot(self, key: BlockKey) -> int | None:
        """The slot in which readers find the block."""
        return None if self._tier_of(key) is None else self._pool.lookup(key)

    def pin_now(self, keys: Sequence[BlockKey]) -> list[Pin] | None:
        """`at_hand` with one transfer reference on each block."""
        pins = self.at_hand(keys)
        if pins is not None:
            self._pool.hold([pin.slot for pin in pins])
        return pins

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Count hits of readers that used the index."""
        slots = [slot for slot in map(self._pool.lookup, keys) if slot is not None]
        self._pool.touch(slots)
        for key in keys:
            self._admission.wanted(key)
            if self._ssd is not None:
                self._ssd.touch(key)
        self._counts["hits"] += len(keys)

    async def pin_each(self, keys: Sequence[BlockKey], leading: bool = False) -> list[Pin | None]:
        """Pins for `keys`, None for missing and damaged blocks. The list is shorter than `keys` if there is no free
        slot to promote the next block into. With `leading`, it ends before the first None."""
        hits = [slot for slot in map(self._pool.lookup, keys) if slot is not None]
        self._pool.touch(hits)  # all before the first promotion, which should evict others
        pins: list[Pin | None] = []
        promotions: dict[int, asyncio.Task[bool]] = {}
        misses = 0
        for key in keys:
            slot, tier = self._slot(key), "dram"
            if slot is None:
                promotion = None if self._tier_of(key) is None else self._promotions.of(key)
                if promotion is None:
                    misses += 1
                    if leading or self._tier_of(key) is not None:
                        break
                    pins.append(None)
                    continue
                slot, tier = promotion.slot, "ssd"
                promotions[len(pins)] = promotion.task
            elif self._ssd is not None:
                self._ssd.touch(key)
            self._pool.hold([slot])
            self._admission.wanted(key)
            pins.append(self._slots.pin(slot, tier))
        self._counts["hits"] += sum(pin is not None for pin in pins) - len(promotions)
        self._counts["misses"] += len(promotions) + misses
        return await self._arrived(pins, promotions, leading) if promotions else pins

    async def _arrived(
        self, pins: list[Pin | None], promotions: dict[int, asyncio.Task[bool]], leading: bool
    ) -> list[Pin | None]:
        """`pins` after their promotions (by position) have ended; failed ones are None, or end the run."""
        run = len(pins)
        try:
            waiting = set(promotions.values())
            while waiting and self._ssd is not None and self._ssd.readable:  # do not wait for a disk that hangs
                _, waiting = await asyncio.wait(waiting, timeout=DISK_CHECK_INTERVAL_S)
            for position in sorted(promotions):
                pin, task = pins[position], promotions[position]
                assert pin is not None
                if task.done() and task.result():
                    pins[position] = self._slots.pin(pin.slot, pin.tier)
                elif leading:
                    run = position
                    break
                else:
                    pins[position] = None
                    self.unpin([pin.slot])
        except BaseException:  # the caller gave up and cannot release the pins
            run = 0
            raise
        finally:
            self.unpin([pin.slot for pin in pins[run:] if pin is not None])
        return pins[:run]

    def unpin(self, slots: Sequence[int]) -> None:
        """Release one reference on each slot."""
        self._pool.unhold(slots)
