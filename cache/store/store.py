"""Store: the pooled store over the DRAM and SSD of all nodes, as one node uses it.

Each node computes the homes of a block (cache/homes/rendezvous.py), so a lookup is one message per home and a get asks
all homes directly and in parallel. There is no master, and no directory that could be stale. A home that fails within a
call is replaced by the next replica within that call (cache/homes/routing.py); a block that no node has is missing, and
every returned block has been verified by its checksum.

Two ways in and out: blocks of whole prefixes between the pool and arenas (`get_into`, `put_from`), without a copy, and
single values as bytes (`get`, `put` and their batch forms), which pass through a staging area.

A call uses the caller's memory until it ends. A cancelled call ends its transfers, which may take a moment, before it
raises CancelledError; then the caller may reuse the memory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cache.arena import Buffer
from cache.block import BlockKey
from cache.homes.rendezvous import Members, by_home
from cache.homes.routing import Router
from cache.messages import STATS, Park, StoreStats
from cache.pool.policy import OBJECTS, Facts
from cache.results import GetResult, LeadingRun, NotDurable, Unreachable
from cache.server.bulk_answers import BulkShare
from cache.server.server import StoreServer
from cache.server.taking import Taking
from cache.sessions.parked import Times
from cache.sites.other_sites import OtherSites
from cache.stable_marks import StableMarks
from cache.store.accounts import Accounts
from cache.store.calls import HOME_ERRORS, Calls
from cache.store.job import MESSAGE_BYTES, NEAR_BULK_BYTES, NEAR_MESSAGE_BYTES, StoreCall
from cache.store.keeper import Keeper
from cache.store.layered import PinnedBlocks, pinned
from cache.store.near_put import NearPut
from cache.store.options import StoreOptions
from cache.store.reader import Reader
from cache.store.same_host import SameHost
from cache.store.scattered import Scattered
from cache.store.streaming import Windows, stream
from cache.store.values import Values, all_lasting, all_taken
from cache.store.writer import Writer
from cache.tiers.local_store import LocalStore
from net.bodies import Nothing, typed
from net.channel.channel import Channel
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

WINDOW_BYTES = 32 << 20  # of blocks leased together from one home: bounds the memory that a slow peer pins
LAYERED_BYTES = 256 << 20  # of blocks leased together by a get in parts, from all homes


class Store:
    """The pool as node `node_id` uses it. `members()` returns the live nodes that have a share, with its bytes.
    Registers the local arena with `transfer`; the caller registers its own regions by `attach`. With `local` None this
    node is only a client."""

    def __init__(
        self,
        node_id: str,
        channel: Channel,
        transfer: TransferEngine,
        local: LocalStore | None,
        members: Callable[[], Members],
        options: StoreOptions,
    ) -> None:
        self.node_id = node_id
        self.local = local
        self.block_bytes = block_bytes = options.block_bytes
        small = block_bytes <= options.message_block_bytes
        self._message_blocks = sys.maxsize if small else min(options.message_call_bytes, MESSAGE_BYTES) // block_bytes
        self._near_message_blocks = (
            sys.maxsize if small else min(options.message_call_bytes, NEAR_MESSAGE_BYTES) // block_bytes
        )
        self._transfer = transfer
        self._members = members
        self.deadlines = options.deadlines
        self._regions: dict[str, Region] = {}
        self._accounts = accounts = Accounts()
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._share = None if local is None else StoreServer(node_id, channel, transfer, local, self.deadlines)
        self._calls = calls = Calls(channel, transfer.bulk, self.deadlines)
        self.router = Router(node_id, options.replicas)
        self.same_host = SameHost(channel, transfer, calls)
        self._reader = Reader(calls, transfer, self.same_host, self.router, self.deadlines, accounts, options.checksums)
        self.other_sites = OtherSites(
            options.other_sites,
            lambda: Router(node_id, options.replicas),
            lambda far: Reader(calls, transfer, self.same_host, far, self.deadlines, accounts, options.checksums),
        )
        self._near = NearPut(calls, transfer)
        self._writer = Writer(
            calls, transfer, self._near, self.router, self.deadlines, accounts.failed, options.checksums
        )
        self._values = Values(block_bytes, self.attach, self._job, self._get, self._put)
        self.scattered = Scattered(block_bytes, self.attach, self._job, self._get, self._put)
        self._keeper: Keeper | None = None
        self._taking: Taking | None = None
        if self._share is not None and local is not None:
            self._taking = Taking(channel, transfer, local, self._share)
            channel.handle(STATS, typed(Nothing, self._stats))
            BulkShare(transfer.bulk, local, self._share)
        if local is not None and self._share is not None and local.arena is not None:
            self.attach(local.arena.region)
            if local.index_region is not None:
                self._transfer.register(local.index_region)
            self._keeper = Keeper(node_id, local, self._share, self._writer, self.router, members, options.repair_limit)

    def attach(self, region: Region) -> None:
        """Allow gets into `region` and puts from it."""
        self._regions[region.name] = region
        self._transfer.register(region)

    def region(self, name: str) -> Region:
        """The attached region of that name. Raises KeyError."""
        return self._regions[name]

    def marks(self) -> StableMarks:
        """The marks of this client's puts to homes on this host."""
        return self._near.marks()

    @property
    def is_routed(self) -> bool:
        """Whether the router knows the present members. Any thread may ask."""
        return self._members() == self.router.members

    @property
    def keeper(self) -> Keeper | None:
        """The keeper, which moves blocks to their homes; `start` it once this node has joined. None without a share."""
        return self._keeper

    # --- lookup

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` that the pool has now; the blocks of a home that does not answer count as
        missing."""
        return (await self.find(keys)).blocks

    async def find(self, keys: Sequence[BlockKey]) -> LeadingRun:
        """The same run, and how much of it the homes must first read from SSD."""
        self._route()
        return (await self._reader.which(keys, leading=True)).leading(len(keys))

    async def exists(self, key: BlockKey) -> bool:
        """Whether the pool has `key` now."""
        return (await self.exists_many([key]))[0]

    async def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        """The same for each of `keys`, with one message per home."""
        self._route()
        have = (await self._reader.which(keys, leading=False)).have
        return [i in have for i in range(len(keys))]

    # --- blocks between the pool and arenas

    async def get_into(
        self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int], site: str | None = None
    ) -> GetResult:
        """Fetch the leading run of `keys` that is available, block i to offsets[i] of `region`. The memory of later
        blocks is undefined afterwards. `site`: from the pool of that other site. Raises ValueError for offsets outside
        the region."""
        job = self._job(keys, region, offsets)
        if site is None:
            return await self._get(job, leading=True)
        await self.other_sites.reader(site).fetch(job, self._window, leading=True)
        return self._accounts.got(job)

    def stream_into(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> AsyncGenerator[GetResult]:
        """The same for a long prefix, window by window (cache/store/streaming.py): each result covers the next intact
        blocks, while the blocks after them arrive. It ends with the prefix or with a result that is shorter than its
        window. A caller that leaves early must close it (`aclose`) before it uses the memory."""
        self._job(keys, region, offsets)
        windows = Windows(self.block_bytes, self._window * max(1, len(self._members())))
        return stream(lambda part: self.get_into(keys[part], region, offsets[part]), len(keys), windows)

    @asynccontextmanager
    async def pinned(self, keys: Sequence[BlockKey]) -> AsyncIterator[PinnedBlocks | None]:
        """Pins all of `keys` at their homes while this is open, to read them part by part (cache/store/layered.py).
        None when not all of them can be pinned together; then use `get_into`."""
        homes = by_home(keys, self._route())
        if not homes or len(keys) > LAYERED_BYTES // self.block_bytes:
            yield None
            return
        async with pinned(self._calls, self._transfer, self.deadlines, keys, homes, self._window) as blocks:
            yield blocks

    async def put_from(
        self,
        keys: Sequence[BlockKey],
        region: str,
        offsets: Sequence[int],
        facts: Sequence[Facts] = (),
        *,
        nbytes: int = 0,
        durable: bool = False,
        pin: bool = False,
        ttl_s: float = 0.0,
    ) -> int:
        """Publish blocks to their homes, block i from offsets[i] of `region`; returns how many are new. `nbytes`: of
        each block, if it does not fill its slot. A block that no home accepts is skipped. With `facts`, one per block,
        the blocks are KV, whose keys identify their content: homes need not agree on it, and may refuse a block to keep
        others (--cache-admission). Without, they are values of a program, like those of `put`. `durable`, `pin`: see
        `put_many`. `ttl_s`: they are copies of blocks of another site (cache/sites/copies.py). Raises ValueError for
        offsets outside the region; with those two also NoRoom, NotDurable."""
        if facts and len(facts) != len(keys):
            raise ValueError(f"{len(keys)} keys, but facts of {len(facts)}")
        job = self._job(keys, region, offsets)
        job.facts, job.durable, job.keep, job.ttl_s = facts or [OBJECTS], durable, pin, ttl_s
        job.agree = not facts
        if nbytes:
            job.lengths = dict.fromkeys(range(len(keys)), nbytes)
        await self._put(job)
        if durable or pin:
            all_taken(job)
            all_lasting(job)
        return len(job.stored)

    # --- values as bytes

    @property
    def values_at_once(self) -> int:
        """Values that one batch moves together; longer batches are split."""
        return self._values.at_once

    async def get(self, key: BlockKey) -> bytes | None:
        """The value, None when it is missing. An empty value cannot be stored, so b'' is never returned."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Each value or None, in order."""
        return await self._values.get_many(keys)

    async def put(self, key: BlockKey, value: Buffer, *, durable: bool = False, pin: bool = False) -> bool:
        """Store 1 to block_bytes bytes; False when the key was there (the first value stays while all homes answer).
        `durable`, `pin`: see `put_many`. Raises ValueError for another length, NoRoom, NotDurable, Unreachable."""
        return (await self.put_many([(key, value)], durable=durable, pin=pin))[0]

    async def put_many(
        self, items: Sequence[tuple[BlockKey, Buffer]], *, durable: bool = False, pin: bool = False, named: bool = False
    ) -> list[bool]:
        """Per item whether it is new. When this raises, some of the items may have been stored.

        When this returns, the items are in the memory of their homes, which write them to their SSD tiers a moment
        later: a home that is killed before that loses them. `durable`: this returns when each item is synced on the SSD
        of one of its homes, where it survives kill -9 of that home; NotDurable gives the reason of a failure. `pin`:
        homes never evict the items, until `unpin_many` or `remove_many`; NoRoom when they hold as many pinned ones as
        they may (--pin-share). `named`: the keys identify their content, so any two copies are equal and the homes need
        not agree."""
        return await self._values.put_many(items, durable=durable, pin=pin, named=named)

    async def unpin_many(self, keys: Sequence[BlockKey]) -> int:
        """Let these be evicted again; returns the number of pinned copies. A node not reached keeps its pins."""
        return await self._sum_of_homes(lambda home: self._calls.give_up(home, keys))

    async def remove(self, key: BlockKey) -> bool:
        """Returns False if no node had it."""
        return await self.remove_many([key]) > 0

    async def remove_many(self, keys: Sequence[BlockKey]) -> int:
        """Remove `keys` from all nodes; returns the number of removed copies. A node not reached keeps its copies."""
        removed = await self._sum_of_homes(lambda home: self._calls.remove(home, keys))
        self._accounts.counts["removed"] += removed
        return removed

    def park(self, keys: Sequence[BlockKey], session: int, times: Times) -> None:
        """A turn of this session (a number from 0 on) is over: tell the first home of each block when it moves down, up
        and is dropped (cache/sessions/). A home that is not reached keeps its blocks by their last use."""
        body = Park.at(session, times)
        for home, positions in by_home(keys, self._route()).items():
            self._calls.park(home, [keys[position] for position in positions], body)

    async def _sum_of_homes(self, question: Callable[[str], Awaitable[int]]) -> int:
        counts = await asyncio.gather(*(self._ask(home, question(home)) for home in self._route()))
        return sum(count or 0 for count in counts)

    async def flush(self) -> None:
        """Wait until all blocks acknowledged so far are synced on SSD at every home that has one. Raises NotDurable
        when a home's disk fails, Unreachable when a home does not answer."""
        homes = list(self._route())
        ends = await asyncio.gather(*(self._calls.flush(home) for home in homes), return_exceptions=True)
        for home, error in zip(homes, ends, strict=True):
            if isinstance(error, RemoteError) and error.code == "disk":
                raise NotDurable(f"{home}: {error}")
            if isinstance(error, HOME_ERRORS):
                self._accounts.failed(home, error)
                raise Unreachable(f"{home} has not said whether its blocks are on SSD: {error!r}")
            if error is not None:
                raise error

    async def room_of_homes(self) -> dict[str, int]:
        """For each home that answers, the blocks that fit in addition to its pinned ones; evictable blocks count as
        room."""
        room = {}
        for home, stats in (await self.stats_of_homes()).items():
            if stats is not None and "tiers" in stats:
                tiers = stats["tiers"]
                below = tiers.get("ssd", {})
                usable = bool(below) and not (below["closed"] or below["failing"] or below["stalled"])
                room[home] = (below if usable else tiers["dram"])["capacity"] - tiers["dram"]["pinned"]
        return room

    async def keys_of_homes(self, prefix: bytes) -> list[BlockKey]:
        """All keys that begin with `prefix`, at the homes that answer; each once, sorted."""
        found = await asyncio.gather(*(self._ask(n, self._calls.list_keys(n, prefix)) for n in self._route()))
        return sorted({key for keys in found for key in keys or ()})

    async def outsets(self, keys: Sequence[BlockKey], nbytes: int) -> dict[BlockKey, bytes]:
        """Up to `nbytes` from the beginning of each of `keys` that some home has. The bytes are not compared with the
        checksum of the block."""
        found: dict[BlockKey, bytes] = {}
        for home in self._route():
            missing = [key for key in keys if key not in found]
            if missing:
                found |= await self._ask(home, self._calls.outsets(home, missing, nbytes)) or {}
        return found

    async def stats_of_homes(self) -> dict[str, dict[str, Any] | None]:
        """Every home's statistics of its share: tiers, share, tenants, repair; None for a home that does not answer."""
        names = list(self._route())
        return dict(zip(names, await asyncio.gather(*(self._ask(n, self._calls.stats(n)) for n in names)), strict=True))

    # --- both

    async def _get(self, job: StoreCall, *, leading: bool = False) -> GetResult:
        await self._reader.fetch(job, self._window, leading=leading)
        return self._accounts.got(job)

    async def _put(self, job: StoreCall) -> StoreCall:
        if job.agree and not self.router.decides_alone(job.keys):
            job.present |= (await self._reader.which(job.keys, leading=False)).have
        await self._writer.publish(job, self._window)
        return self._accounts.put(job)

    def _job(self, keys: Sequence[BlockKey], region: str, offsets: Sequence[int]) -> StoreCall:
        if region not in self._regions:
            raise ValueError(f"region {region!r} is unknown: attach it first")
        if len(keys) != len(offsets):
            raise ValueError(f"{len(keys)} keys and {len(offsets)} offsets")
        last = self._regions[region].nbytes - self.block_bytes
        if outside := [offset for offset in offsets if not 0 <= offset <= last]:
            raise ValueError(f"offsets outside region {region!r}: {outside[:5]}")
        self._route()
        job = StoreCall(keys, self._regions[region], offsets, self.block_bytes)
        job.in_messages = len(keys) <= self._message_blocks
        job.near_ask = len(keys) * self.block_bytes <= NEAR_BULK_BYTES
        job.near_in_messages = len(keys) <= self._near_message_blocks
        return job

    def _route(self) -> Members:
        """The present members, which the router gets too. A node without a share is no home of any block."""
        members = self._members()
        if self.local is None and self.node_id in members:
            members = {name: weight for name, weight in members.items() if name != self.node_id}
        self.router.update(asyncio.get_running_loop().time(), members)
        return self.router.members

    async def _ask(self, home: str, question: Any) -> Any:
        try:
            return await question
        except HOME_ERRORS as error:
            self._accounts.failed(home, error)
            return None

    # --- accounts and life

    def stats(self) -> dict[str, Any]:
        """Counters of this node's use of the pool; its own share under `share`, `tiers` and `tenants`."""
        own: dict[str, Any] = dict(self._accounts.counts)
        if self._share is not None and self.local is not None:
            own |= {"share": self._share.stats(), "tiers": self.local.stats(), "tenants": self.local.tenants()}
        if self._keeper is not None:
            own["repair"] = self._keeper.stats()
        return own

    async def _stats(self, peer: str, body: Nothing, data: memoryview) -> StoreStats:
        return StoreStats(self.stats())

    async def close(self) -> None:
        """Release the leases, then close the local store. Close the transfer engine and the channel first."""
        await self.same_host.close()
        if self._keeper is not None:
            await self._keeper.close()
        if self._taking is not None:
            await self._taking.close()
        if self._share is not None and self.local is not None:
            await self._share.close()
            await self.local.close()
        self._near.close()
        self._values.close()
        self.scattered.close()
