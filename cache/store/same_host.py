"""SameHost: gets and lookups at homes on this host without sending a message.

This process maps their index and their arena (cache/index/shared_index.py), so the reader alone finds and copies a
block in a home's DRAM; a message and its two wake-ups cost more than the copy. A block that is not in the index, or
whose copy fails the check, is requested as from any other home. The homes learn of the hits a moment later, for their
policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache.block import BlockKey
from cache.checked_copy import CheckedCopier, Copy
from cache.copy_threads import CopyThreads
from cache.index.block_read import BlockRead
from cache.index.loans import LOANS_REGION, PAGES
from cache.index.shared_index import INDEX_REGION, IndexView, Row
from cache.store.calls import HOME_ERRORS, Calls
from cache.store.job import StoreCall
from net.channel.channel import Channel
from net.compiled import NotCompiled
from net.loop.tasks import spawn
from net.transfer.common.memory import Region
from net.transfer.common.path import Path
from net.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

HIT_REPORT_S = 0.02  # hits are reported this long after the first of them
HIT_REPORT_KEYS = 256  # or when this many have been collected
MAP_RETRY_S = 1.0  # between two attempts to map a home's memory


class View(NamedTuple):
    """A home's memory as mapped here; `blocks` is None when the home shares no index."""

    path: Path | None
    blocks: IndexView | None
    arena: Region | None


class SameHost:
    """The same-host reads of one client."""

    def __init__(self, channel: Channel, transfer: TransferEngine, calls: Calls) -> None:
        self._transfer = transfer
        self._calls = calls
        self._threads = CopyThreads()
        self._copier = CheckedCopier(self._threads)
        self._code: BlockRead | None = None
        self._code_tried = False
        self._views: dict[str, View] = {}
        self._hits: dict[str, list[BlockKey]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._rest_until: dict[str, float] = {}  # home -> earliest next attempt to map its memory
        self._on_forget: list[Callable[[str], None]] = []
        channel.on_lost(self._forget)
        channel.on_closed(self._forget)

    def view(self, home: str) -> View | None:
        """The home's memory if it is mapped here. If it might be mappable, a task tries that, while this call sends a
        message."""
        path = self._transfer.path_of(home)
        view = self._views.get(home)
        if view is None or view.path is not path:
            self._look_at(home, path)
            return None
        if view.blocks is None or view.arena is None or view.arena.closed:
            return None
        return view

    def known(self, home: str) -> tuple[BlockRead, IndexView, Region] | None:
        """The code that reads blocks of a home, its index and its arena; None if they are not ready. Any thread may
        ask. The memory stays mapped while a view of it is held."""
        view, code = self._views.get(home), self._code
        if view is None or code is None or view.path is None or view.path is not self._transfer.path_seen(home):
            return None
        if view.blocks is None or view.arena is None or view.arena.closed:
            return None
        return code, view.blocks, view.arena

    async def borrow(self, home: str) -> tuple[Region, int] | None:
        """The region of the home's loans (cache/index/loans.py), and the page of this process in it. None if it lends
        nothing. Raises HOME_ERRORS."""
        if self.view(home) is None and (looking := self._looking.get(home)) is not None:
            await asyncio.shield(looking)
        if self.known(home) is None:
            return None
        region = await self._transfer.mapped(home, LOANS_REGION)
        page = -1 if region is None else await self._calls.lend(home)
        return None if region is None or not 0 <= page < PAGES else (region, page)

    def announced(self, home: str) -> None:
        """Blocks in its lent slots: it looks for them only after this."""
        self._calls.filled(home)

    def on_forget(self, callback: Callable[[str], None]) -> None:
        """Call back with each home that is lost: what else keeps its memory mapped must go."""
        self._on_forget.append(callback)

    def were_read(self, home: str, keys: Sequence[BlockKey]) -> None:
        """These were read without this object."""
        self._report_soon(home, list(keys))

    def _look_at(self, home: str, path: Path | None) -> None:
        now = asyncio.get_running_loop().time()
        if home in self._looking or (path is None and not self._transfer.may_be_one_sided(home)):
            return
        if now >= self._rest_until.get(home, 0.0):
            resting = {other: until for other, until in self._rest_until.items() if until > now}
            self._rest_until = resting | {home: now + MAP_RETRY_S}
            self._looking[home] = spawn(self._open(home), "mapping the memory of a home")

    def _forget(self, home: str) -> None:
        """A view would keep the memory of a lost home mapped, and the name may never come back."""
        self._views.pop(home, None)
        for callback in self._on_forget:
            callback(home)

    async def _open(self, home: str) -> None:
        path, index, arena = None, None, None
        try:
            region = await self._transfer.mapped(home, INDEX_REGION)
            path = self._transfer.path_of(home)
            if region is not None:
                index = IndexView(region)
                await self._prepare()
                arena = await self._transfer.mapped(home, index.arena)
        except ValueError as error:
            log.info("home %s: %s", home, error)
        except HOME_ERRORS as error:  # callers send messages then, which show whether it is lost
            log.debug("home %s shows no index: %r", home, error)
        finally:
            del self._looking[home]
        if path is not None:  # otherwise it was not reached, or has been lost since
            self._views[home] = View(path, index, arena)  # valid for that path: another path needs a new attempt

    async def _prepare(self) -> None:
        """Compile the C code, once."""
        if self._code_tried:
            return
        self._code_tried = True
        try:
            self._code = await asyncio.to_thread(BlockRead)
        except NotCompiled as error:
            log.info("copies from homes on this host take 20 %% longer: %s", error)

    def have(self, view: View, keys: Sequence[BlockKey]) -> list[bool]:
        """For each key, True if it is in the home's DRAM; False proves nothing."""
        assert view.blocks is not None
        return [view.blocks.find(key) is not None for key in keys]

    async def read(self, view: View, home: str, job: StoreCall, positions: Sequence[int]) -> list[int]:
        """Copy all blocks that the index lists; returns the positions that are here now, intact."""
        index, arena, size = view.blocks, view.arena, job.block_bytes
        if index is None or arena is None or index.slot_bytes != size:
            return []
        holds = arena.memory[:0], job.region.memory[:0]  # exported buffers keep both mappings while this runs
        try:
            arrived = await self._read_at_once(index, arena, job, positions)
            if len(arrived) < len(positions):
                arrived |= await self._read_in_steps(index, arena, job, [p for p in positions if p not in arrived])
        finally:
            for hold in holds:
                hold.release()
        origin = (home, _transport(view), "dram")
        for position, length in arrived.items():
            if length != size:
                job.lengths[position] = length
            job.arrived[position] = origin
        if arrived:
            self._report_soon(home, [job.keys[position] for position in arrived])
        return list(arrived)

    async def _read_at_once(
        self, index: IndexView, arena: Region, job: StoreCall, positions: Sequence[int]
    ) -> dict[int, int]:
        """Lengths of the blocks that the C code copied, by position."""
        if self._code is None:
            return {}
        keys, start = [job.keys[position] for position in positions], job.region.address
        targets = [start + job.offsets[position] for position in positions]
        lengths = await self._code.get(self._threads, index, arena, keys, targets)
        return {position: length for position, length in zip(positions, lengths, strict=True) if length}

    async def _read_in_steps(
        self, index: IndexView, arena: Region, job: StoreCall, positions: Sequence[int]
    ) -> dict[int, int]:
        """The same in separate steps: find each block, copy it, then hash the copy."""
        rows: list[tuple[int, Row]] = []
        size = job.block_bytes
        for position in positions:
            row = index.find(job.keys[position])
            if row is not None and row.length <= size and (row.slot + 1) * size <= arena.nbytes:  # not half written
                rows.append((position, row))
        sums = await self._copier.copy([_copy(job, position, row, arena) for position, row in rows])
        return {
            position: row.length for (position, row), found in zip(rows, sums, strict=True) if found == row.checksum
        }

    def _report_soon(self, home: str, keys: list[BlockKey]) -> None:
        hits = self._hits.setdefault(home, [])
        hits += keys
        if len(hits) >= HIT_REPORT_KEYS:
            self._calls.used(home, self._hits.pop(home))
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HIT_REPORT_S, self._report)

    def _report(self) -> None:
        self._timer = None
        hits, self._hits = self._hits, {}
        for home, keys in hits.items():
            self._calls.used(home, keys)

    async def close(self) -> None:
        """Idempotent."""
        for task in list(self._looking.values()):
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._copier.close()
        self._threads.close()
        self._views.clear()


def _copy(job: StoreCall, position: int, row: Row, arena: Region) -> Copy:
    offset = job.offsets[position]
    memory = job.region.memory[offset : offset + row.length]
    return Copy(arena.address + row.slot * job.block_bytes, job.region.address + offset, memory)


def _transport(view: View) -> str:
    return view.path.transport if view.path is not None else "shm"
