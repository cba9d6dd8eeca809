"""The sources of the next part of a prompt's prefix, and the time each saves against computing that part. This is the
comparison of Algorithm 1 for one node.

    pool, DRAM only   the blocks before the first one on SSD: costs the transfer to this node
    pool, all         costs the SSD read, as measured by the home, and the transfer
    another arena     costs the transfer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from cache.block import BlockGeometry, BlockKey
from cache.keys import pooled_keys
from cache.results import GetResult
from cache.store.leading import leading_run
from cache.store.store import Store
from engine.core.costs import StepCosts
from engine.handoff.arenas import Arenas
from engine.handoff.borrowing import Borrowing
from engine.pooled.pool_blocks import PoolBlocks
from engine.pooled.prefetch import Get
from sched.cost import TransferModel

POOL = "pool"

ARENA_LOAD_WEIGHT = 1.25
"""Weight of an arena's load time against the pool's: lent blocks cannot be evicted, and the lending node is
decoding."""


@dataclass(frozen=True, slots=True)
class Source:
    """A leading run of blocks that a source probably holds."""

    name: str  # POOL, or the node that owns the arena
    keys: Sequence[BlockKey]
    load_s: float  # estimated
    saved_s: float  # compute time minus load_s; for an arena, minus ARENA_LOAD_WEIGHT * load_s
    block_bytes: int  # transferred per block
    get: Get


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

    async def of(self, keys: Sequence[BlockKey], first: int) -> list[Source]:
        """Sources of keys[first:] that save time, largest saving first; this node holds the first `first` keys. With
        the policy `always`, all sources, longest run first."""
        if self._policy == "never" or first >= len(keys):
            return []
        pooled = await self._pool(keys[first:], first)
        found = pooled + self._others(keys, first, max((len(one.keys) for one in pooled), default=0))
        if self._policy == "always":
            return sorted(found, key=lambda source: len(source.keys), reverse=True)
        return sorted((one for one in found if one.saved_s > 0), key=lambda source: source.saved_s, reverse=True)

    async def _pool(self, keys: Sequence[BlockKey], first: int) -> list[Source]:
        if self._store is None:
            return []
        found = await leading_run(self._store, pooled_keys(keys), self._geometry.groups)
        sources, each = [], self._each
        # number of blocks -> seconds until they are in DRAM
        runs = {found.dram_blocks // each: 0.0, found.blocks // each: found.ssd_s}
        size = each * self._pooled.pool_bytes
        for count, ssd_s in runs.items():
            if count:
                nbytes = (count + self._geometry.state_blocks) * size
                load_s = ssd_s + max(self._way_s(nbytes), self._homes_s(keys[:count], nbytes))
                sources.append(self._source(POOL, keys[:count], first, load_s, size, self._pool_blocks.get))
        return sources

    def _others(self, keys: Sequence[BlockKey], first: int, pooled: int) -> list[Source]:
        """The other arena that saves the most time, as a list of at most one. No node knows at which borders others
        have states, so with states only the pool is a source."""
        if self._of_others is None or self._geometry.state_blocks:
            return []
        sources, size = [], self._geometry.block_bytes
        for node, count in self._of_others.arenas.beyond(keys, first, pooled).items():
            load_s = max(self._way_s(count * size), self._node_s(node, count * size))
            get = partial(self._of_others.borrowing.get, node)
            sources.append(self._source(node, keys[first : first + count], first, load_s, size, get))
        return sorted(sources, key=lambda source: source.saved_s, reverse=True)[:1]

    def _way_s(self, nbytes: int) -> float:
        return self._way.estimate(self._coming + nbytes)

    def _source(
        self, name: str, keys: Sequence[BlockKey], first: int, load_s: float, block_bytes: int, get: Get
    ) -> Source:
        size = self._geometry.block_size
        compute_s = self._costs.prefill.estimate(len(keys) * size, first * size)
        weight = 1.0 if name == POOL else ARENA_LOAD_WEIGHT
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
        their time is not the transfer's alone."""
        if result.nbytes and "ssd" not in result.tiers:
            self._way.observe(before + result.nbytes, seconds)
