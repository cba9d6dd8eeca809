"""Store: the pooled store over the DRAM and SSD of all nodes, as one node uses it.

Where a block lives is computed (cache/homes.py), so a lookup is one message per home and a get goes straight to the
homes, all at once. There is no master and no directory to be stale. Whatever goes wrong with a home, its blocks
are misses; what is returned has been checked against its checksum.

Calls write into or read from the caller's memory until they are over. A cancelled call ends its transfers, which may
take a moment, before it raises CancelledError: then the memory is the caller's again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cache.arena import checksum
from cache.block import BlockKey
from cache.client import HOME_ERRORS, Client, Shunned, Ticket
from cache.homes import by_home
from cache.layered import PinnedBlocks, pinned
from cache.share import PRESENT, Deadlines, Share
from cache.tiers import LocalStore
from net.channel import Channel
from net.errors import RemoteError
from net.memory import Region
from net.transfer import BULK, Op, TransferEngine

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20  # blocks leased at once from one home: bounds what a slow peer pins
LAYERED_BYTES = 256 << 20  # leased at once by a get in parts, from all homes
INLINE_BYTES = 512 << 10  # more than this is checksummed off the event loop
GET_COUNTS = ("gets", "get_blocks", "get_bytes", "get_misses", "corrupt")
PUT_COUNTS = ("puts", "put_blocks", "put_bytes", "put_no_room")


@dataclass(frozen=True, slots=True)
class GetResult:
    """The leading run that arrived whole, and where it came from: blocks by home, by transport, by tier."""

    blocks: int
    nbytes: int
    sources: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """One get or put: block i is keys[i], at offsets[i] of the caller's region."""

    keys: Sequence[BlockKey]
    region: Region
    offsets: Sequence[int]
    arrived: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # position -> home, transport, tier
    stored: int = 0


class Store:
    """The pool, from `node_id`. `members()` names the nodes alive that have a share. Registers the local arena with
    `transfer`; the caller's own regions are made known by `attach`. With `local` None this node is only a client.
    """

    def __init__(
        self,
        node_id: str,
        channel: Channel,
        transfer: TransferEngine,
        local: LocalStore | None,
        members: Callable[[], Sequence[str]],
        *,
        block_bytes: int,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.node_id = node_id
        self.local = local
        self.block_bytes = block_bytes
        self._transfer = transfer
        self._members = members
        self._deadlines = deadlines or Deadlines()
        self._regions: dict[str, Region] = {}
        self._counts = Counter(dict.fromkeys((*GET_COUNTS, *PUT_COUNTS, "home_failures"), 0))
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._share = None if local is None else Share(node_id, channel, transfer, local, self._deadlines)
        self._client = Client(channel, self._deadlines)
        if local is not None and local.arena is not None:
            self.attach(local.arena.region)

    def attach(self, region: Region) -> None:
        """Blocks may be got into and put from `region` from now on."""
        self._regions[region.name] = region
        self._transfer.register(region)

    # --- lookup

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` that the pool has now; a home that does not answer has nothing."""
        groups = self._by_home(keys)
        if not groups:
            return 0
        ends = await asyncio.gather(*(self._first_missing(keys, home, group) for home, group in groups.items()))
        return min(ends)

    async def _first_missing(self, keys: Sequence[BlockKey], home: str, positions: list[int]) -> int:
        try:
            self._client.check(home)
            leading = await self._client.count_leading(home, [keys[position] for position in positions])
        except HOME_ERRORS as error:
            self._failed(home, error)
            return positions[0]
        return positions[leading] if leading < len(positions) else len(keys)

    # --- get

    async def get(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> GetResult:
        """Fetch the leading run of `keys` that can be had, block i to offsets[i] of `region`. What lies there for
        blocks behind the run is undefined afterwards. Raises ValueError for offsets outside the region."""
        job = self._job(keys, region, offsets)
        await self._each_home(job, self._fetch)
        run = next((i for i in range(len(keys)) if i not in job.arrived), len(keys))
        came = [job.arrived[i] for i in range(run)]
        self._counts.update(gets=1, get_blocks=run, get_bytes=run * self.block_bytes, get_misses=len(keys) - run)
        sources, transports, tiers = (dict(Counter(origin[part] for origin in came)) for part in range(3))
        return GetResult(run, run * self.block_bytes, sources, transports, tiers)

    async def _fetch(self, job: Job, home: str, positions: list[int]) -> None:
        while positions:
            batch = positions[: self._window]
            with self._client.ticket(home) as ticket:
                reply = await self._client.pin(home, [job.keys[position] for position in batch], ticket)
                pinned = len(reply["slots"])
                if not pinned or not await self._read(job, home, batch[:pinned], reply, ticket):
                    return
            if pinned < len(batch) and not reply["more"]:
                return
            positions = positions[pinned:]

    async def _read(self, job: Job, home: str, positions: list[int], reply: dict[str, Any], ticket: Ticket) -> bool:
        """Transfer what was pinned and check it; False when a block was damaged."""
        spans = self._spans(job, positions, reply["slots"], reply["slot_bytes"])
        done = await self._transfer.submit(
            home, Op.READ, job.region.name, reply["region"], spans, timeout_s=self._deadlines.transfer_s
        )
        sums = await self._checksums(job, positions)
        for i, position in enumerate(positions):
            if sums[i] == reply["checksums"][i]:
                job.arrived[position] = (home, done.transport, reply["tiers"][i])
            else:
                ticket.bad.append(i)
        if ticket.bad:
            self._counts["corrupt"] += len(ticket.bad)
            log.warning("%d blocks from %s did not match their checksums: dropped", len(ticket.bad), home)
        return not ticket.bad

    @asynccontextmanager
    async def pinned(self, keys: Sequence[BlockKey]) -> AsyncIterator[PinnedBlocks | None]:
        """All of `keys` kept at their homes while this is open, to be read part by part (cache/layered.py). None when
        they cannot be had all at once: then `get`."""
        homes = self._by_home(keys)
        if not homes or len(keys) > LAYERED_BYTES // self.block_bytes:
            yield None
            return
        async with pinned(self._client, self._transfer, self._deadlines, keys, homes, self._window) as blocks:
            yield blocks

    def region(self, name: str) -> Region:
        """What was attached under that name. Raises KeyError."""
        return self._regions[name]

    # --- put

    async def put(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> int:
        """Publish blocks to their homes, block i from offsets[i] of `region`; returns how many were not there
        before. A home that has no room or does not answer is passed over. Raises ValueError for offsets outside
        the region."""
        job = self._job(keys, region, offsets)
        await self._each_home(job, self._publish)
        self._counts.update(puts=1, put_blocks=job.stored, put_bytes=job.stored * self.block_bytes)
        return job.stored

    async def _publish(self, job: Job, home: str, positions: list[int]) -> None:
        while positions:
            batch = positions[: self._window]
            with self._client.ticket(home) as ticket:
                reply = await self._client.reserve(home, [job.keys[position] for position in batch], ticket)
                answers = reply["slots"]
                granted = [(p, slot) for p, slot in zip(batch, answers, strict=False) if slot != PRESENT]
                if granted:
                    await self._write(job, home, [p for p, _ in granted], [slot for _, slot in granted], reply, ticket)
            if not answers:
                self._counts["put_no_room"] += len(positions)
                return
            positions = positions[len(answers) :]

    async def _write(
        self, job: Job, home: str, positions: list[int], slots: list[int], reply: dict[str, Any], ticket: Ticket
    ) -> None:
        spans = self._spans(job, positions, slots, reply["slot_bytes"])
        sums = await self._checksums(job, positions)
        await self._transfer.submit(
            home, Op.WRITE, job.region.name, reply["region"], spans, timeout_s=self._deadlines.transfer_s, priority=BULK
        )
        stored = await self._client.commit(home, sums, ticket)
        job.stored += stored  # after the await: homes add to it in any order

    # --- both

    def _job(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> Job:
        if region not in self._regions:
            raise ValueError(f"region {region!r} is unknown: attach it first")
        if len(keys) != len(offsets):
            raise ValueError(f"{len(keys)} keys and {len(offsets)} offsets")
        last = self._regions[region].nbytes - self.block_bytes
        if outside := [offset for offset in offsets if not 0 <= offset <= last]:
            raise ValueError(f"offsets outside region {region!r}: {outside[:5]}")
        return Job(keys, self._regions[region], offsets)

    def _by_home(self, keys: Sequence[BlockKey]) -> dict[str, list[int]]:
        members = [m for m in self._members() if self.local is not None or m != self.node_id]
        return by_home(keys, members)

    async def _each_home(self, job: Job, work: Callable[[Job, str, list[int]], Coroutine[Any, Any, None]]) -> None:
        async def guarded(home: str, positions: list[int]) -> None:
            try:
                self._client.check(home)
                await work(job, home, positions)
            except HOME_ERRORS as error:
                self._failed(home, error)

        groups = self._by_home(job.keys).items()
        ends = await asyncio.gather(*(guarded(home, group) for home, group in groups), return_exceptions=True)
        for end in ends:  # only now, when no home's transfer is under way any more
            if end is not None:
                raise end

    def _failed(self, home: str, error: Exception) -> None:
        self._counts["home_failures"] += 1
        log.log(logging.DEBUG if isinstance(error, Shunned) else logging.INFO, "home %s: %r", home, error)

    def _spans(self, job: Job, positions: list[int], slots: list[int], slot_bytes: int) -> list[tuple[int, int, int]]:
        if slot_bytes != self.block_bytes:
            raise RemoteError(f"the home has blocks of {slot_bytes} bytes, ours have {self.block_bytes}", "layout")
        pairs = zip(positions, slots, strict=True)
        return [(job.offsets[position], slot * slot_bytes, slot_bytes) for position, slot in pairs]

    async def _checksums(self, job: Job, positions: list[int]) -> list[int]:
        """Of the blocks as they lie in the caller's region."""

        def sums() -> list[int]:
            starts = [job.offsets[position] for position in positions]
            return [checksum(job.region.memory[start : start + self.block_bytes]) for start in starts]

        return sums() if len(positions) * self.block_bytes <= INLINE_BYTES else await asyncio.to_thread(sums)

    # --- accounts and life

    def stats(self) -> dict[str, Any]:
        """Counters of this node's use of the pool; its own share under `share` and `tiers`."""
        own: dict[str, Any] = dict(self._counts)
        if self._share is not None and self.local is not None:
            own |= {"share": self._share.stats(), "tiers": self.local.stats()}
        return own

    async def close(self) -> None:
        """Give leases back, then close the local store. Close transfer engine and channel first."""
        if self._share is not None and self.local is not None:
            await self._share.close()
            await self.local.close()
