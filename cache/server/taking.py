"""Taking: puts of processes on this host. The home copies the blocks from their memory into its own slots.

One question and one copy, which also computes the checksums: no lease, and nobody else writes to the home's memory. A
process that gives up its put clears the mark of the put (cache/stable_marks.py); then the copy is discarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.block_copy import BlockCopy
from cache.checked_copy import CheckedCopier, Copy
from cache.copy_threads import CopyThreads
from cache.messages import TAKE, Take, TakenThere
from cache.protocol import STORED, split_keys
from cache.server.peer_regions import PeerRegions
from cache.server.server import StoreServer
from cache.stable_marks import MARKS_REGION, holds
from cache.tiers.local_store import LocalStore
from net.bodies import BodyError, decode, encode
from net.channel.channel import Channel
from net.compiled import NotCompiled
from net.errors import RemoteError
from net.loop.tasks import spawn
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from net.transfer.tcp.bulk_call import Answer

log = logging.getLogger(__name__)

UNMAPPED = TakenThere([], [], mapped=False)
AT_ONCE_BYTES = 1 << 20  # copied on the event loop without a turn, about 0.15 ms


@dataclass(slots=True)
class Job:
    """One question, and the regions that it names."""

    take: Take
    keys: list[BlockKey]
    lengths: Sequence[int]
    source: Region
    marks: Region


class Taking:
    """Answers for `local`, with the accounts of `share`: on data connections, and as messages."""

    def __init__(self, channel: Channel, transfer: TransferEngine, local: LocalStore, share: StoreServer) -> None:
        self._local = local
        self._share = share
        self._regions = PeerRegions(channel, transfer)
        self._threads = CopyThreads()
        self._copier = CheckedCopier(self._threads)
        self._compiling: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()
        channel.handle(TAKE, self._message)
        transfer.bulk.answer(TAKE, self._question)

    async def _message(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        job = self._job(peer, decode(Take, body))
        return encode(UNMAPPED if job is None else await self._take(job))

    def _question(self, peer: str, body: dict[str, Any]) -> Answer | Coroutine[Any, Any, Answer]:
        job = self._job(peer, decode(Take, body))
        if job is None:
            return Answer(encode(UNMAPPED))
        if sum(job.lengths) > AT_ONCE_BYTES:
            return self._answer_later(job)
        slots = self._share.room_now(job.keys, job.take.offer)
        if not slots and not job.take.offer.divert:
            return self._answer_later(job)
        try:
            sums = self._copier.copy_now(self._copies(job, slots))
            return Answer(encode(self._stored(job, slots, sums)))
        except BaseException:
            self._abandon(slots)
            raise

    async def _answer_later(self, job: Job) -> Answer:
        return Answer(encode(await self._take(job)))

    async def _take(self, job: Job) -> TakenThere:
        if job.source.closed or job.marks.closed:  # before this task began
            return UNMAPPED
        held = job.source.memory[:0], job.marks.memory[:0]  # exports keep the regions mapped, even if they are closed
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)
        slots: list[int] = []
        try:
            slots = await self._share.room(job.keys, job.take.offer)
            sums = await self._copier.copy(self._copies(job, slots))
            return self._stored(job, slots, sums)
        except BaseException:
            self._abandon(slots)
            raise
        finally:
            self._running.discard(running)
            for one in held:
                one.release()

    def _job(self, peer: str, take: Take) -> Job | None:
        """Checks the question. None if its memory is not mapped here (yet). Raises BodyError, RemoteError."""
        self._share.settle()
        keys, arena = split_keys(take.keys), self._local.arena
        lengths = take.lengths or [take.slot_bytes] * len(keys)
        if len(take.offsets) != len(keys) or len(lengths) != len(keys):
            raise BodyError(f"{len(take.offsets)} offsets and {len(lengths)} lengths of {len(keys)} blocks")
        take.offer.check(len(keys))
        if arena is None:
            return None
        if take.slot_bytes != arena.slot_bytes or max(lengths, default=0) > arena.slot_bytes:
            raise RemoteError(f"the home has blocks of {arena.slot_bytes} bytes, the asker others", "layout")
        found = self._regions.find(peer, take.region, MARKS_REGION)
        if self._compiling is None:
            self._compiling = spawn(self._compile(), "compiling the copy of blocks")
        if found is None:
            return None
        source, marks = found
        if any(offset + length > source.nbytes for offset, length in zip(take.offsets, lengths, strict=True)):
            raise BodyError(f"blocks outside region {take.region!r} of {source.nbytes} bytes")
        return Job(take, keys, lengths, source, marks)

    def _copies(self, job: Job, slots: Sequence[int]) -> list[Copy]:
        arena = self._local.arena
        assert arena is not None
        start, target, size = job.source.address, arena.region.address, arena.slot_bytes
        return [
            Copy(start + offset, target + slot * size, arena.memory(slot)[:length])
            for slot, offset, length in zip(slots, job.take.offsets, job.lengths, strict=False)
            if slot >= 0
        ]

    def _stored(self, job: Job, slots: Sequence[int], sums: Sequence[int]) -> TakenThere:
        """The copies become blocks, if the put has not been given up. Raises RemoteError."""
        take = job.take
        if not holds(job.marks, take.mark):
            raise RemoteError("the put was given up", "given_up")
        positions = [position for position, slot in enumerate(slots) if slot >= 0]
        if (contents := take.offer.contents) is not None:  # copies keep their checksums: readers find their damage
            sums = [contents.checksums[position] for position in positions]
        elif not take.checks:
            sums = [UNCHECKED] * len(positions)
        answers, checksums = [min(0, slot) for slot in slots], list(sums)
        for at, position in reversed(list(enumerate(positions))):  # in StoreServer's order
            content = sums[at], job.lengths[position]
            answers[position] = self._share.stored(job.keys[position], slots[position], content, take.offer)
            if answers[position] != STORED:
                del checksums[at]
        return TakenThere(answers, checksums, self._share.why_short(slots, len(job.keys)))

    def _abandon(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot >= 0:
                self._local.reservations.abandon(slot)

    async def _compile(self) -> None:
        try:
            self._copier.code = await asyncio.to_thread(BlockCopy)
        except NotCompiled as error:
            log.info("copies of blocks take 20 %% longer: %s", error)

    async def close(self) -> None:
        """Close the channel and the transfer engine first: they cancel the running questions. Idempotent."""
        await self._regions.close()
        await asyncio.gather(*self._running, *([self._compiling] if self._compiling else []), return_exceptions=True)
        self._copier.close()
        self._threads.close()
