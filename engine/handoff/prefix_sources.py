"""The sources of the next part of a prompt's prefix, and the time each saves against computing that part. This is the
comparison of Algorithm 1 for one node.

    pool, DRAM only   the blocks before the first one on SSD: costs the transfer to this node
    pool, all         costs the SSD read, as measured by the home, and the transfer
    another arena     costs the transfer
    another site      costs the wait for the link's budget, the distance and the transfer, for the part that the pool
                      of this site lacks (engine/sites/far_prefixes.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from cache.block import BlockGeometry, BlockKey
from cache.keys import pooled_keys
from cache.results import GetResult
from cache.store.store import Store
from engine.core.costs import StepCosts
from engine.handoff.arenas import Arenas
from engine.handoff.borrowing import Borrowing
from engine.handoff.leading import leading_run
from engine.pooled.pool_blocks import PoolBlocks
from engine.pooled.prefetch import Get
from engine.sites.far_prefixes import FarPrefixes
from engine.step.step import Named
from sched.cost import TransferModel

POOL = "pool"

ARENA_LOAD_WEIGHT = 1.25
"""Weight of an arena's load time against the pool's: lent blocks cannot be evicted, and the lending node is
decoding."""


@dataclass(frozen=True, slots=True)
class Source:
    """A leading run of blocks that a source probably holds."""

    name: str  # POOL, the node that owns the arena, or another site
    keys: Sequence[BlockKey]
    load_s: float  # estimated
    saved_s: float  # compute time minus load_s; for an arena, minus ARENA_LOAD_WEIGHT * load_s
    block_bytes: int  # transferred per block
    get: Get
    site: str | None = None  # the other site from which a part of it comes
    arrived: Callable[[Sequence[Named]], None] | None = None  # to be called with the blocks in the arena


@dataclass(frozen=True, slots=True)
class Prices:
    """Cost models: prefill, and lower bounds in seconds at the current rail rates for reading `nbytes` of `keys` from
    their homes (`homes_s`) or from one node (`node_s`)."""

    costs: StepCosts
    homes_s: Callable[[Sequence[BlockKey], int], float] = lambda keys, nbytes: 0.0
    node_s: Callable[[str, int], float] = lambda node, nbytes: 0.0


@dataclass(frozen=True, slots=True)
class OthersArenas:
    """The arenas of other nodes: which blocks lie there, and how they are read."""

    arenas: Arenas
    borrowing: Borrowing


class PrefixSources:
    """The pool and the arenas of other nodes; either may be None. `policy`: auto, always or never."""

    far: FarPrefixes | None = None
    """The pools of other sites, if KV may come from there."""

    def __init__(
        self,
        store: Store | None,
        pool_blocks: PoolBlocks,
        others: OthersArenas | None,
        geometry: BlockGeometry,
        prices: Prices,
        policy: str,
        pooled: BlockGeometry | None = None,
    ) -> None:
        """pooled: the blocks of the pool, if they are not like those of `geometry`."""
        self._pooled = pooled or geometry
        self._each = geometry.block_size // self._pooled.block_size
        self._store = store
        self._pool_blocks = pool_blocks
        self._of_others = others
        self._geometry = geometry
        self._costs = prices.costs
        self._policy = policy
        self._homes_s = prices.homes_s
        self._node_s = prices.node_s
        self._way = TransferModel()  # from remote memory to this node, queued behind transfers in flight
        self._coming = 0  # bytes in flight

    async def of(self, keys: Sequence[BlockKey], first: int, crosses: bool = True) -> list[Source]:
        """Sources of keys[first:] that save time, largest saving first; this node holds the first `first` keys. With
        the policy `always`, all sources, longest run first, but of those at other sites only such as save time.
        `crosses`: whether the KV may come from another site."""
        if self._policy == "never" or first >= len(keys):
            return []
        pooled = await self._pool(keys[first:], first)
        found = pooled + self._others(keys, first, max((len(one.keys) for one in pooled), default=0))
        if self.far is not None and crosses and self._geometry.groups is None:
            found += await self._far(self.far, keys, first, pooled)
        if self._policy == "always":
            return sorted(found, key=lambda source: len(source.keys), reverse=True)
        return sorted((one for one in found if one.saved_s > 0), key=lambda source: source.saved_s, reverse=True)

    async def _pool(self, keys: Sequence[BlockKey], first: int) -> list[Source]:
        if self._store is None:
            return []
        geometry = self._geometry
        found = await leading_run(self._store, pooled_keys(keys), geometry.groups, first, geometry.block_size)
        sources, each = [], self._each
        # number of blocks -> seconds until they are in DRAM
        runs = {found.dram_blocks // each: 0.0, found.blocks // each: found.ssd_s}
        size = each * self._pooled.pool_bytes
        for count, ssd_s in runs.items():
            if count:
                nbytes = (count + self._geometry.others_fetched(first, first + count)) * size
                load_s = ssd_s + max(self._way_s(nbytes), self._homes_s(keys[:count], nbytes))
                sources.append(self._source(POOL, keys[:count], first, load_s, size, self._pool_blocks.get))
        return sources

    async def _far(
        self, far: FarPrefixes, keys: Sequence[BlockKey], first: int, pooled: Sequence[Source]
    ) -> list[Source]:
        """What the pool of this site lacks, from those of other sites: one source per site that saves time."""
        near = max(pooled, key=lambda one: len(one.keys), default=None)
        count = 0 if near is None else len(near.keys)
        here = frozenset(keys[first : first + count])
        known, size, sources = first + count, self._geometry.block_size, []

        def compute_s(blocks: int) -> float:
            return self._costs.prefill.estimate(blocks * size, known * size)

        block_bytes = self._each * self._pooled.pool_bytes
        for run in await far.of(keys[known:], compute_s, block_bytes):
            whole = keys[first : known + run.blocks]
            load_s = run.load_s + (0.0 if near is None else near.load_s)
            get = partial(far.get, run.site, here, block_bytes)
            found = self._source(f"site {run.site}", whole, first, load_s, block_bytes, get)
            sources.append(replace(found, site=run.site, arrived=partial(far.arrived, count)))
        return sources

    def _others(self, keys: Sequence[BlockKey], first: int, pooled: int) -> list[Source]:
        """The other arena that saves the most time, as a list of at most one."""
        if self._of_others is None:
            return []
        sources, size = [], self._geometry.block_bytes
        for node, count in self._of_others.arenas.beyond(keys, first, pooled).items():
            nbytes = (count + self._geometry.others_fetched(first, first + count)) * size
            load_s = max(self._way_s(nbytes), self._node_s(node, nbytes))
            get = partial(self._of_others.borrowing.get, node)
            run = keys[first : first + count]
            sources.append(self._source(node, run, first, load_s, size, get, ARENA_LOAD_WEIGHT))
        return sorted(sources, key=lambda source: source.saved_s, reverse=True)[:1]

    def _way_s(self, nbytes: int) -> float:
        return self._way.estimate(self._coming + nbytes)

    def _source(
        self,
        name: str,
        keys: Sequence[BlockKey],
        first: int,
        load_s: float,
        block_bytes: int,
        get: Get,
        weight: float = 1.0,
    ) -> Source:
        size = self._geometry.block_size
        compute_s = self._costs.prefill.estimate(len(keys) * size, first * size)
        return Source(name, keys, load_s, compute_s - weight * load_s, block_bytes, get)

    @contextmanager
    def loading(self, num_bytes: int) -> Iterator[int]:
        """Count `num_bytes` as in flight while the context is open; yields the bytes that were in flight before."""
        before = self._coming
        self._coming += num_bytes
        try:
            yield before
        finally:
            self._coming -= num_bytes

    def observe(self, result: GetResult, before: int, seconds: float) -> None:
        """Learn from a load that took `seconds` behind `before` bytes. Loads that read from SSD are ignored, because
        their time is not the transfer's alone. Rounded blocks count with the bytes of exact ones, as in estimates."""
        if result.nbytes and "ssd" not in result.tiers:
            self._way.observe(before + result.nbytes + result.saved_bytes, seconds)
