"""Reader: runs a lookup or a get through the homes: pin, read, check, and continue at the next replica.

A home that fails, or that turns out to lack a block, costs only another wave within the call. So does a home that takes
far longer than usual while another replica could be asked (cache/homes/pace.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.arena import UNCHECKED, checksum
from cache.block import BlockKey
from cache.homes.routing import ReadWalk, Router
from cache.messages import BlocksRead, Pinned
from cache.protocol import ELSEWHERE, Deadlines
from cache.results import LeadingRun
from cache.ssd_reads import SsdPrice
from cache.store.accounts import Accounts
from cache.store.bulk_reader import BulkReader
from cache.store.calls import HOME_ERRORS, Calls, Ticket, TooSlow
from cache.store.job import MESSAGE_BYTES, StoreCall, at_each, in_pieces
from cache.store.same_host import SameHost
from net.loop.clock import loop_time
from net.transfer.engine import Completion, Op, TransferEngine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seen:
    """Which of some keys the pool has, by position."""

    have: set[int] = field(default_factory=set)
    on_ssd: dict[int, str] = field(default_factory=dict)  # position -> home that must read the block from its SSD
    prices: dict[str, SsdPrice] = field(default_factory=dict)  # home -> price of its SSD reads

    def leading(self, count: int) -> LeadingRun:
        """The leading run of `count` keys. Homes read in parallel, so the slowest one determines the wait."""
        run = next((at for at in range(count) if at not in self.have), count)
        on_ssd = {at: home for at, home in self.on_ssd.items() if at < run}
        by_home = Counter(on_ssd.values())
        wait_s = max((self.prices[home].seconds(blocks) for home, blocks in by_home.items()), default=0.0)
        return LeadingRun(run, min(on_ssd, default=run), len(on_ssd), wait_s)


class Reader:
    """`accounts` records every failure of a home; it counts 'corrupt' blocks and 'given_up', homes that were too
    slow."""

    def __init__(
        self,
        calls: Calls,
        transfer: TransferEngine,
        same_host: SameHost,
        router: Router,
        deadlines: Deadlines,
        accounts: Accounts,
        checksums: bool = True,
    ) -> None:
        self._calls = calls
        self._transfer = transfer
        self._same_host = same_host
        self._router = router
        self._deadlines = deadlines
        self._accounts = accounts
        self._checksums = checksums
        self._bulk = BulkReader(calls, router, self._patience, self._damaged, checksums)

    async def which(self, keys: Sequence[BlockKey], *, leading: bool) -> Seen:
        """Which of `keys` the pool has now; with `leading` it looks for the leading run only."""
        walk = self._router.read(loop_time(), keys, 0)
        found = Seen()

        async def ask(home: str, positions: list[int]) -> None:
            try:
                self._calls.check(home)
                seen = self._seen(home, keys, positions)
                found.have.update(seen)
                walk.found_all(seen)
                if not (positions := [position for position in positions if position not in seen]):
                    return
                asked = [keys[position] for position in positions]
                patience_s = self._patience(walk, home, positions)
                look = await self._calls.has(home, asked, leading=leading and walk.single, patience_s=patience_s)
            except TooSlow as error:
                self._give_up(walk, home, positions, error)
                return
            except HOME_ERRORS as error:
                self._accounts.failed(home, error)
                for position in positions:
                    walk.elsewhere(position)
                return
            if look.on_ssd:
                found.on_ssd.update(dict.fromkeys((positions[at] for at in look.on_ssd), home))
                found.prices[home] = look.price
            for position, answer in zip(positions, look.have, strict=False):
                if answer == 0:
                    found.have.add(position)
                    walk.found(position)
                elif answer == ELSEWHERE:
                    walk.elsewhere(position)

        while groups := walk.wave(leading):
            await at_each(groups, ask)
        return found

    def _seen(self, home: str, keys: Sequence[BlockKey], positions: list[int]) -> set[int]:
        """Positions that the index of a home on this host lists."""
        view = self._same_host.view(home) if self._checksums else None
        if view is None:
            return set()
        found = self._same_host.have(view, [keys[position] for position in positions])
        return {position for position, here in zip(positions, found, strict=True) if here}

    async def fetch(self, job: StoreCall, window: int, *, leading: bool) -> None:
        """Fill `job.arrived` and `job.lengths`; `window`: blocks pinned together at one home."""
        walk = self._router.read(loop_time(), job.keys, job.block_bytes)

        async def take(home: str, positions: list[int]) -> None:
            try:
                self._calls.check(home)
                await self._take(job, walk, home, positions, window, leading and walk.single)
            except TooSlow as error:
                self._give_up(walk, home, [p for p in positions if p not in job.arrived], error)
            except HOME_ERRORS as error:
                self._accounts.failed(home, error)
                for position in positions:
                    if position not in job.arrived:
                        walk.elsewhere(position)

        while groups := walk.wave(leading):
            await at_each(groups, take)

    def _patience(self, walk: ReadWalk, home: str, positions: Sequence[int]) -> float | None:
        return self._router.paces.patience(home) if walk.has_others(positions) else None

    def _give_up(self, walk: ReadWalk, home: str, positions: Sequence[int], error: TooSlow) -> None:
        self._router.paces.given_up(loop_time(), home, error.waited_s)
        self._accounts.counts["given_up"] += 1
        log.info("%s: asking another replica", error)
        for position in positions:
            walk.too_slow(position, home)

    async def _take(
        self, job: StoreCall, walk: ReadWalk, home: str, positions: list[int], window: int, leading: bool
    ) -> None:
        positions = await self._take_here(job, walk, home, positions)
        if positions and self._transfer.bulk.reaches(home):
            await self._bulk.take(job, walk, home, positions, leading)
            return
        paces = self._router.paces
        by_message = job.by_message(self._transfer, home)
        if by_message:
            window = min(window, max(1, MESSAGE_BYTES // job.block_bytes))
        while positions:
            batch = positions[:window]
            nbytes, begin = len(batch) * job.block_bytes, loop_time()
            paces.started(home, nbytes)
            patience_s = self._patience(walk, home, batch)
            try:
                reply, answered, whole = await self._ask(job, walk, home, batch, leading, patience_s, by_message)
            except BaseException:
                paces.failed(home, nbytes)
                raise
            answers = reply.slots
            paces.ended(home, nbytes, answered - begin, loop_time() - answered if answers else 0.0)
            for position, answer in zip(batch, answers, strict=False):
                if answer == ELSEWHERE:
                    walk.elsewhere(position)
            for position, replicas in reply.hot:
                self._router.heated(loop_time(), job.keys[batch[position]], replicas)
            if not answers or (leading and not whole) or (len(answers) < len(batch) and not reply.more):
                return
            positions = positions[len(answers) :]

    async def _take_here(self, job: StoreCall, walk: ReadWalk, home: str, positions: list[int]) -> list[int]:
        """Copies blocks from the DRAM of a home on this host without a message; returns the remaining positions. It
        needs checksums, because nothing else would verify the copies."""
        view = self._same_host.view(home) if self._checksums else None
        if view is None:
            return positions
        nbytes, begin = len(positions) * job.block_bytes, loop_time()
        self._router.paces.started(home, nbytes)
        try:
            arrived = await self._same_host.read(view, home, job, positions)
        except BaseException:
            self._router.paces.failed(home, nbytes)
            raise
        self._router.paces.ended(home, nbytes, 0.0, loop_time() - begin if len(arrived) == len(positions) else 0.0)
        walk.found_all(arrived)
        if len(arrived) == len(positions):
            return []
        here = set(arrived)
        return [position for position in positions if position not in here]

    async def _ask(
        self,
        job: StoreCall,
        walk: ReadWalk,
        home: str,
        batch: list[int],
        leading: bool,
        patience_s: float | None,
        by_message: bool,
    ) -> tuple[Pinned | BlocksRead, float, bool]:
        """The home's reply, the time of its arrival, and whether all blocks of the home have arrived intact."""
        keys = [job.keys[position] for position in batch]
        if by_message:
            read, data = await self._calls.read(home, keys, leading=leading, patience_s=patience_s)
            return read, loop_time(), self._unpack(job, walk, home, batch, read, data)
        with self._calls.ticket(home) as ticket:
            reply = await self._calls.pin(home, keys, ticket, leading=leading, patience_s=patience_s)
            answered, positions = loop_time(), batch[: len(reply.slots)]
            return reply, answered, await self._read(job, walk, home, positions, reply, ticket, patience_s)

    def _unpack(
        self, job: StoreCall, walk: ReadWalk, home: str, batch: list[int], reply: BlocksRead, data: memoryview
    ) -> bool:
        """Copies small blocks from the data after the reply; False when one is damaged."""
        found = [position for position, slot in zip(batch, reply.slots, strict=False) if slot >= 0]
        rows = zip(found, reply.lengths, reply.checksums, reply.tiers, strict=True)
        transport = "local" if home == self._router.me else "message"
        memory, offsets, size, start, bad = job.region.memory, job.offsets, job.block_bytes, 0, []
        origins = {tier: (home, transport, tier) for tier in set(reply.tiers)}
        whole: list[int] = []
        for position, length, block_checksum, tier in rows:
            block = data[start : start + length]
            start += length
            if length > size or (self._checks(block_checksum) and checksum(block) != block_checksum):
                bad.append(job.keys[position])
                continue
            offset = offsets[position]
            memory[offset : offset + length] = block
            if length != size:
                job.lengths[position] = length
            job.arrived[position] = origins[tier]
            whole.append(position)
        walk.found_all(whole)
        if bad:
            self._damaged(home, len(bad))
            self._calls.report(home, bad)
        return not bad

    def _checks(self, wanted: int) -> bool:
        """Whether bytes must be compared with the checksum `wanted`."""
        return self._checksums and wanted != UNCHECKED

    def _damaged(self, home: str, count: int) -> None:
        counts = self._accounts.counts
        before, now = counts["corrupt"], counts["corrupt"] + count
        counts["corrupt"] = now
        if before.bit_length() < now.bit_length():  # at powers of two, so that a damaged disk does not fill the log
            log.warning("%d blocks from %s did not match their checksums: dropped (%d so far)", count, home, now)

    async def _read(
        self,
        job: StoreCall,
        walk: ReadWalk,
        home: str,
        positions: list[int],
        reply: Pinned,
        ticket: Ticket,
        patience_s: float | None,
    ) -> bool:
        """Transfer the pinned blocks of `positions` and check them; False when one is damaged."""
        slots = [slot for slot in reply.slots if slot >= 0]
        found = [position for position, slot in zip(positions, reply.slots, strict=True) if slot >= 0]
        job.note_lengths(found, reply.lengths)

        async def move(part: slice) -> None:
            spans = [
                job.span(position, slot, reply.place.slot_bytes)
                for position, slot in zip(found[part], slots[part], strict=True)
            ]
            done = await self._move(home, job.region.name, reply.place.region, spans, patience_s)
            wanted = reply.checksums[part]
            sums = await job.checksums(found[part]) if any(map(self._checks, wanted)) else wanted
            for at, block_checksum in zip(range(part.start, part.stop), sums, strict=True):
                if block_checksum == wanted[at - part.start] or not self._checks(wanted[at - part.start]):
                    job.arrived[found[at]] = (home, done.transport, reply.tiers[at])
                    walk.found(found[at])
                else:
                    ticket.bad.append(at)

        await in_pieces(len(found), job.block_bytes, move)
        if ticket.bad:
            self._damaged(home, len(ticket.bad))
        return not ticket.bad

    async def _move(
        self, home: str, local: str, remote: str, spans: list[tuple[int, int, int]], patience_s: float | None
    ) -> Completion:
        most = self._deadlines.transfer_s
        impatient = patience_s is not None and patience_s < most
        wait_s = patience_s if patience_s is not None and impatient else most
        try:
            return await self._transfer.submit(home, Op.READ, local, remote, spans, timeout_s=wait_s)
        except TimeoutError:
            if impatient:
                raise TooSlow(home, wait_s) from None
            raise
