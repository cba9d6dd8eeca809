"""Writer: the way of a put through the homes: reserve, write, commit, and on to the next member when one cannot.

The members that stand in for a home are told whose place they take, and give the block back later (cache/keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache.arena import UNCHECKED
from cache.bulk_put import BulkPut
from cache.calls import HOME_ERRORS, Calls, Ticket
from cache.job import MESSAGE_BYTES, PIECE_BYTES, Job, at_each, in_pieces
from cache.protocol import KEPT, PINS_FULL, PRESENT, Deadlines
from cache.routing import Router, Target
from net.transfer import BULK, Op, TransferEngine


class Writer:
    """`failed(home, error)` is told of every home that does not do what was asked."""

    def __init__(
        self,
        calls: Calls,
        transfer: TransferEngine,
        router: Router,
        deadlines: Deadlines,
        failed: Callable[[str, Exception], None],
        checksums: bool = True,
    ) -> None:
        self._calls = calls
        self._transfer = transfer
        self._router = router
        self._deadlines = deadlines
        self._failed = failed
        self._checksums = checksums

    async def publish(self, job: Job, window: int) -> None:
        """Write every block to its homes, `window` reserved at once at one of them; fills stored, present, refused, and
        what the job asked for beyond that: on_disk, pinned."""
        walk = self._router.write(job.keys)

        async def place(target: Target, positions: list[int]) -> None:
            settled: set[int] = set()
            try:
                self._calls.check(target.home)
                await self._place(job, target, positions, window, settled)
                full = True
                if job.keep and settled:
                    await self._keep(job, target.home, sorted(settled))
                if job.durable and settled:
                    await self._make_durable(job, target.home, sorted(settled))
            except HOME_ERRORS as error:
                self._failed(target.home, error)
                full = False
            for position in positions:
                if position not in settled:
                    if full and target.wait:
                        job.refused.add(position)
                    walk.failed(position, target, full=full)

        while groups := walk.wave():
            await at_each(groups, place)

    async def offer(self, job: Job, home: str, window: int) -> set[int]:
        """Copies of blocks for one home that should have them; returns the positions that are there afterwards. Raises
        HOME_ERRORS."""
        settled: set[int] = set()
        self._calls.check(home)
        await self._place(job, Target(home, wait=True), list(range(len(job.keys))), window, settled)
        return settled

    async def _place(self, job: Job, target: Target, positions: list[int], window: int, settled: set[int]) -> None:
        """`settled` gets the positions that the target has afterwards."""
        bulk = self._transfer.bulk
        if bulk.reaches(target.home) or (job.near_ask and bulk.beside(target.home)):
            positions = await self._ask(job, target, positions, settled)
            if not target.wait:
                return
        elif job.by_message(self._transfer, target.home):
            await self._send(job, target, positions, settled)
            return
        while positions:
            batch = positions[:window]
            keys = [job.keys[position] for position in batch]
            with self._calls.ticket(target.home) as ticket:
                reply = await self._calls.reserve(
                    target.home,
                    keys,
                    ticket,
                    divert=not target.wait,
                    owner=target.owner,
                    repair=job.repair,
                    **about(job, batch),
                )
                answers = reply["slots"]
                note_trouble(job, reply)
                granted = [(p, slot) for p, slot in zip(batch, answers, strict=False) if slot != PRESENT]
                new = {position for position, _ in granted}
                there = set(batch[: len(answers)]) - new
                job.present |= there
                settled |= there
                if granted:
                    await self._write(job, target, [p for p, _ in granted], [s for _, s in granted], reply, ticket)
                job.stored |= new
                settled |= new
            if target.wait and not answers:
                return
            positions = positions[len(answers) if target.wait else len(batch) :]

    async def _ask(self, job: Job, target: Target, positions: list[int], settled: set[int]) -> list[int]:
        """Over data connections, piece by piece; `settled` as above; returns those for which there is no room. What is
        more than the first piece, or large, is not sent before the home has said that it does not have it."""
        options: dict[str, Any] = {"divert": True} if not target.wait else {}
        options |= {"owner": target.owner} if target.owner else {}
        options |= {"repair": True} if job.repair else {}
        left: list[int] = []

        async def send(some: list[int]) -> None:
            if left:  # nor will there be for these
                left.extend(some)
                return
            call = BulkPut(job, some, options | about(job, some), self._checksums)
            await self._calls.ask(target.home, call)
            answers = call.answer["slots"]
            note_trouble(job, call.answer)
            for position, answer in zip(some, answers, strict=False):
                (job.present if answer == PRESENT else job.stored).add(position)
                settled.add(position)
            left.extend(some[len(answers) :])

        async def part(sure: bool, some: list[int]) -> None:
            if not sure:
                have = await self._calls.has(target.home, [job.keys[position] for position in some], leading=False)
                there = {position for position, answer in zip(some, have, strict=True) if answer == 0}
                job.present |= there
                settled.update(there)
                some = [position for position in some if position not in there]
            await in_pieces(len(some), job.block_bytes, lambda piece: send(some[piece]))

        step = PIECE_BYTES // job.block_bytes
        groups = {True: positions[:step], False: positions[step:]}
        await at_each({sure: some for sure, some in groups.items() if some}, part)
        return left

    async def _send(self, job: Job, target: Target, positions: list[int], settled: set[int]) -> None:
        """Small blocks in messages; `settled` as above."""
        window, memory = max(1, MESSAGE_BYTES // job.block_bytes), job.region.memory
        while positions:
            batch = positions[:window]
            await self._sum(job, batch)
            lengths = [job.length(position) for position in batch]
            body: dict[str, Any] = {
                "lengths": lengths,
                "checksums": [job.sums[position] for position in batch],
                "divert": not target.wait,
                "owner": target.owner,
                "repair": job.repair,
            }
            body |= about(job, batch)
            starts = [job.offsets[position] for position in batch]
            blocks = [memory[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            reply = await self._calls.write(target.home, [job.keys[p] for p in batch], blocks, body)
            answers = list(reply["slots"])
            note_trouble(job, reply)
            for position, answer in zip(batch, answers, strict=False):
                (job.present if answer == PRESENT else job.stored).add(position)
                settled.add(position)
            if target.wait and not answers:
                return
            positions = positions[len(answers) if target.wait else len(batch) :]

    async def _write(
        self,
        job: Job,
        target: Target,
        positions: Sequence[int],
        slots: Sequence[int],
        reply: dict[str, Any],
        ticket: Ticket,
    ) -> None:
        async def move(part: slice) -> None:
            await self._sum(job, positions[part])
            spans = [
                job.span(position, slot, reply["slot_bytes"])
                for position, slot in zip(positions[part], slots[part], strict=True)
            ]
            await self._transfer.submit(
                target.home,
                Op.WRITE,
                job.region.name,
                reply["region"],
                spans,
                timeout_s=self._deadlines.transfer_s,
                priority=BULK,
                epoch=reply["epoch"],
            )

        await in_pieces(len(positions), job.block_bytes, move)
        lengths = [job.length(position) for position in positions] if job.lengths else None
        await self._calls.commit(target.home, [job.sums[position] for position in positions], ticket, lengths)

    async def _keep(self, job: Job, home: str, positions: list[int]) -> None:
        answers = await self._calls.keep(home, [job.keys[position] for position in positions])
        job.pinned |= {position for position, answer in zip(positions, answers, strict=True) if answer == KEPT}
        if PINS_FULL in answers:
            job.trouble.add(f"{home} keeps as many pinned values as it may: raise its --pin-share, or unpin some")

    async def _make_durable(self, job: Job, home: str, positions: list[int]) -> None:
        durable, why = await self._calls.durable(home, [job.keys[position] for position in positions])
        job.on_disk |= {position for position, good in zip(positions, durable, strict=True) if good}
        if why:
            job.trouble.add(f"{home}: {why}")

    async def _sum(self, job: Job, positions: Sequence[int]) -> None:
        """Once per block, however many homes it has."""
        missing = [position for position in positions if position not in job.sums]
        if not self._checksums:
            job.sums.update(dict.fromkeys(missing, UNCHECKED))
            return
        job.sums.update(zip(missing, await job.checksums(missing), strict=True))


def about(job: Job, positions: Sequence[int]) -> dict[str, Any]:
    """What homes are told of blocks: facts, one row where it is the same for all, and which are kept."""
    if not job.facts:
        return {}
    chosen = job.facts if len(job.facts) == 1 else [job.facts[position] for position in positions]
    if len(set(chosen)) == 1:
        chosen = chosen[:1]
    options: dict[str, Any] = {"facts": [(one.position, one.cost_s, one.service_class) for one in chosen]}
    if any(job.kept):
        options["kept"] = [job.kept[position] for position in positions]
    return options


def note_trouble(job: Job, reply: Mapping[str, Any]) -> None:
    if trouble := reply.get("trouble"):
        job.trouble.add(trouble)
