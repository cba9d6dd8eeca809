"""Writer: runs a put through the homes: reserve, write, commit, and continue at the next member if one fails.

A member that replaces a home is told which home it replaces, and moves the block to that home later
(cache/store/keeper.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.homes.agreement import Content
from cache.homes.deciding import DecidingWalk
from cache.homes.routing import Router, Target, WriteWalk
from cache.messages import Reserved, Write
from cache.offer import BlockFacts, Contents, Offer
from cache.protocol import KEPT, OTHER, OVER, PINS_FULL, PRESENT, STORED, WRITING, Deadlines
from cache.store.bulk_put import BulkPut
from cache.store.calls import HOME_ERRORS, Calls, Ticket
from cache.store.job import MESSAGE_BYTES, PIECE_BYTES, StoreCall, at_each, in_pieces
from cache.store.near_put import NearPut
from net.loop.clock import loop_time
from net.transfer.engine import Op, TransferEngine

TAKE_BLOCKS = 128  # of one question to a home on this host: bounds how long its event loop is busy with them
RETRY_PAUSE_S, RETRY_PAUSE_MAX_S = 0.005, 0.1  # before an undecided home is asked again; doubles


class Writer:
    """`failed(home, error)` is called for every failure of a home."""

    def __init__(
        self,
        calls: Calls,
        transfer: TransferEngine,
        near: NearPut,
        router: Router,
        deadlines: Deadlines,
        failed: Callable[[str, Exception], None],
        checksums: bool = True,
    ) -> None:
        self._calls = calls
        self._transfer = transfer
        self._near = near
        self._router = router
        self._deadlines = deadlines
        self._failed = failed
        self._checksums = checksums

    async def publish(self, job: StoreCall, window: int) -> None:
        """Write every block to its homes, `window` reserved together at one home; fills stored, present, refused, over
        and, if the job requires them, on_disk and pinned. If the homes must agree (`job.agree`), blocks that are
        already `present` are left unchanged."""
        if not job.agree:
            await self._go(job, window, self._router.write(job.keys, job.replicas))
            return
        left = [position for position in range(len(job.keys)) if position not in job.present]
        if not self._checksums:
            await self._sum(job, left)  # otherwise they are computed while the blocks move to the deciding home
        walk = DecidingWalk(self._router, job.keys, left, job.replicas)
        await self._go(job, window, walk)
        for home, positions in walk.owed.items():
            self._calls.uneven(home, [job.keys[position] for position in positions])
        if job.keep or job.durable:
            await self._last_there(job)

    async def _last_there(self, job: StoreCall) -> None:
        """Apply `_last` to the blocks that homes already had, at all their homes."""
        groups: dict[str, list[int]] = {}
        for position in sorted(job.present):
            for home in self._router.homes(job.keys[position]):
                groups.setdefault(home, []).append(position)

        async def last(home: str, positions: list[int]) -> None:
            try:
                self._calls.check(home)
                await self._last(job, home, positions)
            except HOME_ERRORS as error:
                self._failed(home, error)

        await at_each(groups, last)

    async def _last(self, job: StoreCall, home: str, positions: list[int]) -> None:
        """Pin the blocks and make them durable, if the job requires it."""
        if job.keep and positions:
            await self._keep(job, home, positions)
        if job.durable and positions:
            await self._make_durable(job, home, positions)

    async def _go(self, job: StoreCall, window: int, walk: WriteWalk | DecidingWalk) -> None:
        patient_until, pause_s, busy = loop_time() + self._deadlines.control_s, RETRY_PAUSE_S, False

        async def place(target: Target, positions: list[int]) -> None:
            nonlocal busy
            ends: dict[int, int] = {}
            try:
                self._calls.check(target.home)
                await self._place(job, target, positions, window, ends)
                full = True
                good = (STORED,) if job.agree else (STORED, PRESENT)
                await self._last(job, target.home, sorted(p for p, answer in ends.items() if answer in good))
            except HOME_ERRORS as error:
                self._failed(target.home, error)
                full = False
            for position in positions:
                answer = ends.get(position)
                if answer == WRITING and loop_time() < patient_until:
                    walk.again(position, target)
                    busy = True
                elif answer is None or answer == WRITING:
                    no_room = full and answer is None
                    if no_room and target.wait:
                        job.refused.add(position)
                    walk.failed(position, target, full=no_room)
                else:
                    _note(job, position, answer, target)
                    walk.settled(position, target, answer)

        while groups := walk.wave():
            await at_each(groups, place)
            if busy:
                await asyncio.sleep(pause_s)
                pause_s, busy = min(2 * pause_s, RETRY_PAUSE_MAX_S), False

    async def has(self, home: str, contents: Mapping[BlockKey, Content]) -> set[BlockKey]:
        """The keys that the home has with these contents. Raises HOME_ERRORS."""
        self._calls.check(home)
        keys = list(contents)
        offered = Contents([checksum for checksum, _ in contents.values()], [length for _, length in contents.values()])
        look = await self._calls.has(home, keys, leading=False, contents=offered)
        return {key for key, answer in zip(keys, look.have, strict=True) if answer == 0}

    async def offer(self, job: StoreCall, home: str, window: int) -> dict[int, int]:
        """Offer copies of blocks to one home that should have them; returns its answers by position, without those for
        which it has no room. Raises HOME_ERRORS."""
        ends: dict[int, int] = {}
        self._calls.check(home)
        await self._place(job, Target(home, wait=True), list(range(len(job.keys))), window, ends)
        job.stored.update(position for position, answer in ends.items() if answer == STORED)
        return ends

    async def _place(
        self, job: StoreCall, target: Target, positions: list[int], window: int, ends: dict[int, int]
    ) -> None:
        """`ends` gets the target's answers: STORED, or the reason for another end."""
        bulk = self._transfer.bulk
        if bulk.reaches(target.home) or (job.near_ask and bulk.reaches_same_host(target.home)):
            positions = await self._ask(job, target, positions, ends)
            if not target.wait:
                return
        elif not (positions := await self._let_take(job, target, positions, window, ends)):
            return
        elif job.by_message(self._transfer, target.home):
            await self._send(job, target, positions, ends)
            return
        while positions:
            batch = positions[:window]
            keys = [job.keys[position] for position in batch]
            with self._calls.ticket(target.home) as ticket:
                reply = await self._calls.reserve(target.home, keys, ticket, _offer(job, target, batch))
                answers = reply.slots
                _note_trouble(job, reply.trouble)
                granted = [(p, slot) for p, slot in zip(batch, answers, strict=False) if slot >= 0]
                ends.update((p, answer) for p, answer in zip(batch, answers, strict=False) if answer < 0)
                if granted:
                    written = [p for p, _ in granted]
                    stored = await self._write(job, target, written, [s for _, s in granted], reply, ticket)
                    ends.update(zip(written, stored, strict=True))
            if target.wait and not answers:
                return
            positions = positions[len(answers) if target.wait else len(batch) :]

    async def _let_take(
        self, job: StoreCall, target: Target, positions: list[int], window: int, ends: dict[int, int]
    ) -> list[int]:
        """Let a home on this host copy the blocks; `ends` as above; returns those that must go another way."""
        checks = self._checksums or self._distinguishes(job)
        while positions:
            batch = positions[: min(window, TAKE_BLOCKS)]
            taken = await self._near.put(target.home, job, batch, _offer(job, target, batch), checks)
            if taken is None:
                return positions
            answers = taken.slots
            _note_trouble(job, taken.trouble)
            ends.update(zip(batch, answers, strict=False))
            stored = [position for position, answer in zip(batch, answers, strict=False) if answer >= 0]
            job.sums.update(zip(stored, taken.checksums, strict=True))
            if target.wait and not answers:
                return []
            positions = positions[len(answers) if target.wait else len(batch) :]
        return []

    async def _ask(self, job: StoreCall, target: Target, positions: list[int], ends: dict[int, int]) -> list[int]:
        """Over data connections, piece by piece; `ends` as above; returns those for which there is no room. Large
        blocks, and those after the first piece, are sent only after the home has answered that it lacks them."""
        left: list[int] = []

        async def send(some: list[int]) -> None:
            if left:  # there will be no room for these either
                left.extend(some)
                return
            call = BulkPut(job, some, _offer(job, target, some), self._checksums)
            await self._calls.ask(target.home, call, priority=job.priority)
            taken = call.taken()
            _note_trouble(job, taken.trouble)
            ends.update(zip(some, taken.slots, strict=False))
            left.extend(some[len(taken.slots) :])

        async def part(sure: bool, some: list[int]) -> None:
            if not sure:
                keys, contents = [job.keys[position] for position in some], _contents(job, target, some)
                look = await self._calls.has(target.home, keys, leading=False, contents=contents)
                there = {position for position, answer in zip(some, look.have, strict=True) if answer == 0}
                ends.update(dict.fromkeys(there, PRESENT))
                some = [position for position in some if position not in there]
            await in_pieces(len(some), job.block_bytes, lambda piece: send(some[piece]))

        step = PIECE_BYTES // job.block_bytes
        groups = {True: positions[:step], False: positions[step:]}
        await at_each({sure: some for sure, some in groups.items() if some}, part)
        return left

    async def _send(self, job: StoreCall, target: Target, positions: list[int], ends: dict[int, int]) -> None:
        """Send small blocks in messages; `ends` as above."""
        window, memory = max(1, MESSAGE_BYTES // job.block_bytes), job.region.memory
        while positions:
            batch = positions[:window]
            await self._sum(job, batch)
            lengths = [job.length(position) for position in batch]
            starts = [job.offsets[position] for position in batch]
            blocks = [memory[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            body = Write(lengths, [job.sums[position] for position in batch], _offer(job, target, batch))
            taken = await self._calls.write(target.home, [job.keys[p] for p in batch], blocks, body)
            answers = taken.slots
            _note_trouble(job, taken.trouble)
            ends.update(zip(batch, answers, strict=False))
            if target.wait and not answers:
                return
            positions = positions[len(answers) if target.wait else len(batch) :]

    async def _write(
        self,
        job: StoreCall,
        target: Target,
        positions: Sequence[int],
        slots: Sequence[int],
        reply: Reserved,
        ticket: Ticket,
    ) -> list[int]:
        """Returns the home's answer about each block."""

        async def move(part: slice) -> None:
            await self._sum(job, positions[part])
            spans = [
                job.span(position, slot, reply.place.slot_bytes)
                for position, slot in zip(positions[part], slots[part], strict=True)
            ]
            await self._transfer.submit(
                target.home,
                Op.WRITE,
                job.region.name,
                reply.place.region,
                spans,
                timeout_s=self._deadlines.transfer_s,
                priority=job.priority,
                epoch=reply.place.epoch,
            )

        await in_pieces(len(positions), job.block_bytes, move)
        lengths = [job.length(position) for position in positions] if job.lengths else ()
        sums = [job.sums[position] for position in positions]
        return await self._calls.commit(target.home, sums, ticket, lengths)

    async def _keep(self, job: StoreCall, home: str, positions: list[int]) -> None:
        answers = await self._calls.keep(home, [job.keys[position] for position in positions])
        job.pinned |= {position for position, answer in zip(positions, answers, strict=True) if answer == KEPT}
        if PINS_FULL in answers:
            job.trouble.add(f"{home} keeps as many pinned values as it may: raise its --pin-share, or unpin some")

    async def _make_durable(self, job: StoreCall, home: str, positions: list[int]) -> None:
        durable, why = await self._calls.durable(home, [job.keys[position] for position in positions])
        job.on_disk |= {position for position, good in zip(positions, durable, strict=True) if good}
        if why:
            job.trouble.add(f"{home}: {why}")

    def _distinguishes(self, job: StoreCall) -> bool:
        """Whether homes tell the values of one key apart by their checksums."""
        return job.agree and max(self._router.replicas, job.replicas) > 1

    async def _sum(self, job: StoreCall, positions: Sequence[int]) -> None:
        """Compute checksums once per block, regardless of the number of homes."""
        missing = [position for position in positions if position not in job.sums]
        if not self._checksums and not self._distinguishes(job):
            job.sums.update(dict.fromkeys(missing, UNCHECKED))
            return
        job.sums.update(zip(missing, await job.checksums(missing), strict=True))


def _offer(job: StoreCall, target: Target, positions: Sequence[int]) -> Offer:
    """The facts about the blocks that the target gets."""
    kept = [job.kept[position] for position in positions] if any(job.kept) else ()
    return Offer(
        divert=not target.wait,
        owner=target.owner,
        decide=job.agree and not target.copy,
        repair=job.repair,
        kept=kept,
        contents=_contents(job, target, positions),
        facts=_facts(job, positions),
        ttl_ms=round(1000 * job.ttl_s),
    )


def _contents(job: StoreCall, target: Target, positions: Sequence[int]) -> Contents | None:
    """The contents of copies; None if the keys identify them."""
    if not (job.repair or target.copy):
        return None
    return Contents([job.sums[position] for position in positions], [job.length(position) for position in positions])


def _facts(job: StoreCall, positions: Sequence[int]) -> BlockFacts | None:
    """The facts of the blocks; one row if they are equal for all."""
    if not job.facts:
        return None
    chosen = job.facts if len(job.facts) == 1 else [job.facts[position] for position in positions]
    if len(set(chosen)) == 1:
        chosen = chosen[:1]
    return BlockFacts(
        [one.position for one in chosen], [one.cost_s for one in chosen], [one.service_class for one in chosen]
    )


def _note(job: StoreCall, position: int, answer: int, target: Target) -> None:
    """Write one home's answer into the job. The deciding home says whether a value is new, unless another home has a
    value that stays in its place."""
    if answer == OVER:
        job.over.add(position)
    elif answer != STORED:
        if not target.copy or answer == OTHER:
            job.present.add(position)
    elif not target.copy:
        job.stored.add(position)


def _note_trouble(job: StoreCall, trouble: str) -> None:
    if trouble:
        job.trouble.add(trouble)
