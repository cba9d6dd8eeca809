"""A get in two steps: it pins all blocks at their homes, then reads the same part of all blocks before the next part.
Layer-wise loading of a prefix (Mooncake, arXiv 2407.00079, section 5.2) uses it.

A part that has landed is not checked yet: a checksum covers a whole block, so only the end of the last part shows
whether the bytes are right. A caller that computes with parts must discard its result when `read` returns False: until
then no block has a key under which another request could find it, and no token leaves the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.messages import Pinned
from cache.protocol import Deadlines
from cache.store.calls import HOME_ERRORS, Calls, Ticket
from net.loop.tasks import awaited
from net.transfer.common.memory import Region
from net.transfer.engine import Completion, Op, TransferEngine

log = logging.getLogger(__name__)

Part = tuple[int, int]
"""(offset in a block, length), bytes."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that one home pins for this node: keys[positions[i]] is in its slot pinned.slots[i]."""

    home: str
    positions: list[int]
    pinned: Pinned
    ticket: Ticket


@asynccontextmanager
async def pinned(
    calls: Calls,
    transfer: TransferEngine,
    deadlines: Deadlines,
    keys: Sequence[BlockKey],
    homes: Mapping[str, list[int]],
    window: int,
) -> AsyncIterator[PinnedBlocks | None]:
    """Lease all of `keys` together, `window` per message; `homes`: positions of the keys by home. None when a home does
    not answer, lacks a block (it may have passed it on), or has no room to read one from its SSD."""
    with ExitStack() as stack:

        async def lease(home: str, positions: list[int]) -> list[Lease]:
            leases: list[Lease] = []
            try:
                calls.check(home)
                for first in range(0, len(positions), window):
                    batch = positions[first : first + window]
                    ticket = stack.enter_context(calls.ticket(home))
                    reply = await calls.pin(home, [keys[position] for position in batch], ticket)
                    if len(reply.slots) < len(batch) or min(reply.slots) < 0:  # ABSENT, ELSEWHERE
                        break
                    leases.append(Lease(home, batch, reply, ticket))
            except HOME_ERRORS as error:  # not through the stack: it would treat the other homes as lost too
                log.info("home %s: %r", home, error)
            return leases

        found = await asyncio.gather(*(lease(*share) for share in homes.items()))
        leases = [one for some in found for one in some]
        whole = sum(len(one.positions) for one in leases) == len(keys)
        yield PinnedBlocks(transfer, deadlines, leases) if whole else None


class PinnedBlocks:
    """Blocks that stay readable at their homes while `pinned` is open."""

    def __init__(self, transfer: TransferEngine, deadlines: Deadlines, leases: Sequence[Lease]) -> None:
        self._transfer = transfer
        self._deadlines = deadlines
        self._leases = leases
        self.transports: Counter[str] = Counter()  # bytes

    @property
    def fill_slots(self) -> bool:
        """Whether every block is as long as a slot."""
        return not any(lease.pinned.lengths for lease in self._leases)

    @property
    def sources(self) -> dict[str, int]:
        """Blocks by home."""
        counts: Counter[str] = Counter()
        for lease in self._leases:
            counts[lease.home] += len(lease.positions)
        return dict(counts)

    @property
    def tiers(self) -> dict[str, int]:
        """Blocks by tier of their home."""
        return dict(Counter(tier for lease in self._leases for tier in lease.pinned.tiers))

    async def read(
        self, region: Region, offsets: Sequence[int], parts: Sequence[Part], landed: Callable[[int], None]
    ) -> bool:
        """Read block i to offsets[i] of `region`; landed(j) is called when parts[j] of all of them has arrived.
        Otherwise like `read_parts`."""

        async def there(index: int) -> None:
            landed(index)

        return await self.read_parts(
            region, lambda index: [offset + parts[index][0] for offset in offsets], parts, there
        )

    async def read_parts(
        self,
        region: Region,
        places: Callable[[int], Sequence[int]],
        parts: Sequence[Part],
        landed: Callable[[int], Awaitable[None]],
    ) -> bool:
        """Read parts[j] of block i to places(j)[i] of `region`, one part after the other; together the parts cover the
        blocks from front to end. landed(j) runs when parts[j] of all blocks has arrived, while part j+1 arrives; part
        j+2 is requested after landed(j) has returned, so two alternating areas are enough. False when a home fails or a
        block does not match its checksum, which is reported to the home: the checksum is computed part by part, so no
        part has to stay. Nothing is written after this returns or is cancelled."""
        sums = _Checksums(self._leases)
        coming = self._begin(region, places(0), parts[0])
        try:
            for index, (_, length) in enumerate(parts):
                if self._any_failed(await coming):
                    return False
                here = places(index)
                if index + 1 < len(parts):
                    coming = self._begin(region, places(index + 1), parts[index + 1])
                await landed(index)
                if sums.wanted:
                    await asyncio.to_thread(sums.add, region.memory, here, length)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)  # no caller awaits it any more
        bad = sums.differing()
        for lease, positions in bad:
            lease.ticket.bad += positions
        return not any(positions for _, positions in bad)

    def _begin(
        self, region: Region, places: Sequence[int], part: Part
    ) -> asyncio.Task[list[Completion | BaseException]]:
        reads = [self._read(region, places, lease, part) for lease in self._leases]
        return awaited(_all(reads))

    def _any_failed(self, done: Sequence[Completion | BaseException]) -> bool:
        failed = [self._failed(*pair) for pair in zip(self._leases, done, strict=True)]
        return any(failed)

    def _failed(self, lease: Lease, done: Completion | BaseException) -> bool:
        """Account for one home's part. Raises errors that no home can cause."""
        if isinstance(done, Completion):
            self.transports[done.transport] += done.nbytes
            return False
        if not isinstance(done, HOME_ERRORS):
            raise done
        log.info("home %s: %r", lease.home, done)
        if isinstance(done, ConnectionError):
            lease.ticket.open = False  # the lost home ends the lease by itself
        return True

    async def _read(self, region: Region, places: Sequence[int], lease: Lease, part: Part) -> Completion:
        size, (start, length) = lease.pinned.place.slot_bytes, part
        pairs = zip(lease.positions, lease.pinned.slots, strict=True)
        spans = [(places[position], slot * size + start, length) for position, slot in pairs]
        return await self._transfer.submit(
            lease.home, Op.READ, region.name, lease.pinned.place.region, spans, timeout_s=self._deadlines.transfer_s
        )


async def _all(reads: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion | BaseException]:
    return await asyncio.gather(*reads, return_exceptions=True)


class _Checksums:
    """Checksums of leased blocks, computed part by part; equal to cache.arena.checksum of the whole blocks. Skips
    blocks whose homes have no checksum."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = leases
        self._sums = [
            [(i, position, xxh3_64()) for i, position in enumerate(lease.positions) if _checked(lease, i)]
            for lease in leases
        ]
        self.wanted = any(self._sums)

    def add(self, memory: memoryview, places: Sequence[int], length: int) -> None:
        """Add the next `length` bytes of each block i, which are at places[i]."""
        for sums in self._sums:
            for _, position, one in sums:
                one.update(memory[places[position] : places[position] + length])

    def differing(self) -> list[tuple[Lease, list[int]]]:
        """Positions in each lease whose bytes differ from the stored ones."""
        return [
            (lease, [i for i, _, one in sums if one.intdigest() != lease.pinned.checksums[i]])
            for lease, sums in zip(self._leases, self._sums, strict=True)
        ]


def _checked(lease: Lease, position: int) -> bool:
    return lease.pinned.checksums[position] != UNCHECKED
