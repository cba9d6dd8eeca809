"""A get in two halves: everything is pinned at its homes first, then it is read part by part, the same part of all
blocks before the next. Layer-wise loading of a prefix (Mooncake, arXiv 2407.00079, section 5.2) is made of it.

A part that has landed is not checked yet: a checksum covers a whole block, so only the end of the last part says
whether the bytes were right. Who computes with parts has to take the result back when `read` says no.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cache.arena import UNCHECKED, checksum
from cache.block import BlockKey
from cache.calls import HOME_ERRORS, Calls, Ticket
from cache.protocol import Deadlines
from net.memory import Region
from net.transfer import Completion, Op, TransferEngine

log = logging.getLogger(__name__)

Part = tuple[int, int]
"""(offset in a block, length), bytes."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that one home keeps for us: keys[positions[i]] lies in its slot reply["slots"][i]."""

    home: str
    positions: list[int]
    reply: dict[str, Any]
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
    """Lease all of `keys` at once, `window` per message; `homes`: positions of the keys by home. None when a home does
    not answer, does not have all of its share, or has no room to show it."""
    with ExitStack() as stack:

        async def lease(home: str, positions: list[int]) -> list[Lease]:
            leases: list[Lease] = []
            try:
                calls.check(home)
                for first in range(0, len(positions), window):
                    batch = positions[first : first + window]
                    ticket = stack.enter_context(calls.ticket(home))
                    reply = await calls.pin(home, [keys[position] for position in batch], ticket)
                    if len(reply["slots"]) < len(batch):
                        break
                    leases.append(Lease(home, batch, reply, ticket))
            except HOME_ERRORS as error:  # not through the stack: it would take the other homes for lost, too
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
    def sources(self) -> dict[str, int]:
        """Blocks by home."""
        counts: Counter[str] = Counter()
        for lease in self._leases:
            counts[lease.home] += len(lease.positions)
        return dict(counts)

    @property
    def tiers(self) -> dict[str, int]:
        """Blocks by tier of their home."""
        return dict(Counter(tier for lease in self._leases for tier in lease.reply["tiers"]))

    async def read(
        self, region: Region, offsets: Sequence[int], parts: Sequence[Part], landed: Callable[[int], None]
    ) -> bool:
        """Read block i to offsets[i] of `region`; landed(j) is called when parts[j] of all of them is there. False
        when a home fails or a block does not match its checksum, of which the home is told. Nothing is written any
        more when this returns or is cancelled."""
        for index, part in enumerate(parts):
            reads = [self._read(region, offsets, lease, part) for lease in self._leases]
            done = await asyncio.gather(*reads, return_exceptions=True)
            failed = [self._failed(*pair) for pair in zip(self._leases, done, strict=True)]
            if any(failed):
                return False
            landed(index)
        bad = await asyncio.to_thread(self._damaged, region, offsets)
        for lease, positions in bad:
            lease.ticket.bad += positions
        return not any(positions for _, positions in bad)

    def _failed(self, lease: Lease, done: Completion | BaseException) -> bool:
        """Account for one home's part. Raises what no home can cause."""
        if isinstance(done, Completion):
            self.transports[done.transport] += done.nbytes
            return False
        if not isinstance(done, HOME_ERRORS):
            raise done
        log.info("home %s: %r", lease.home, done)
        if isinstance(done, ConnectionError):
            lease.ticket.open = False  # it is lost and knows by itself
        return True

    async def _read(self, region: Region, offsets: Sequence[int], lease: Lease, part: Part) -> Completion:
        size, (start, length) = lease.reply["slot_bytes"], part
        pairs = zip(lease.positions, lease.reply["slots"], strict=True)
        spans = [(offsets[position] + start, slot * size + start, length) for position, slot in pairs]
        return await self._transfer.submit(
            lease.home, Op.READ, region.name, lease.reply["region"], spans, timeout_s=self._deadlines.transfer_s
        )

    def _damaged(self, region: Region, offsets: Sequence[int]) -> list[tuple[Lease, list[int]]]:
        """Positions in each lease whose bytes are not what was stored."""
        out = []
        for lease in self._leases:
            size = lease.reply["slot_bytes"]
            starts = [offsets[position] for position in lease.positions]
            sums = [checksum(region.memory[start : start + size]) for start in starts]
            wanted = lease.reply["checksums"]
            out.append((lease, [i for i, one in enumerate(sums) if one != wanted[i] != UNCHECKED]))
        return out
