"""Where the next part of a prompt's prefix can be had, and what each source saves beside computing it: Algorithm 1's
comparison for one node.

    pool, DRAM only   the blocks in front of the first that lies on SSD: the time of the way here
    pool, all         the time of the way, and before it that of the SSD tiers, as their nodes measure it
    another arena     the time of the way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from cache.block import BlockGeometry, BlockKey
from cache.results import GetResult
from cache.store.store import Store
from engine.core.costs import StepCosts
from engine.handoff.arenas import Arenas
from engine.handoff.borrowing import Borrowing
from engine.pooled.pool_blocks import PoolBlocks
from engine.pooled.prefetch import Get
from sched.cost import TransferModel

POOL = "pool"

LENT = 1.25
"""An arena has to be faster by so much than the pool: its blocks cannot be evicted meanwhile, and its node decodes."""


@dataclass(frozen=True, slots=True)
class Source:
    """A leading run of blocks that can be had, as far as is known."""

    name: str  # POOL, or the node whose arena it is
    keys: Sequence[BlockKey]
    load_s: float  # estimated
    saved_s: float  # the time to compute them, less load_s; of an arena less LENT times that
    block_bytes: int  # that move
    get: Get


@dataclass(frozen=True, slots=True)
class Prices:
    """What computing takes; what so many bytes take at least from the homes of these blocks and from a node, as the
    rails are now."""

    costs: StepCosts
    homes_s: Callable[[Sequence[BlockKey], int], float] = lambda keys, nbytes: 0.0
    node_s: Callable[[str, int], float] = lambda node, nbytes: 0.0


class PrefixSources:
    """The pool, and the arenas of other nodes; either may be None. `policy`: auto, or always."""

    def __init__(
        self,
        store: Store | None,
        pool_blocks: PoolBlocks,
        arenas: Arenas | None,
        borrowing: Borrowing | None,
        geometry: BlockGeometry,
        prices: Prices,
        policy: str,
    ) -> None:
        self._store = store
        self._pool_blocks = pool_blocks
        self._arenas = arenas
        self._borrowing = borrowing
        self._geometry = geometry
        self._costs = prices.costs
        self._policy = policy
        self._homes_s = prices.homes_s
        self._node_s = prices.node_s
        self._way = TransferModel()  # into this node, out of memory, behind what is on its way already
        self._coming = 0  # bytes of that

    async def of(self, keys: Sequence[BlockKey], first: int) -> list[Source]:
        """For keys[first:], those that pay, the one that saves most first; `first` of `keys` are here. With the policy
        `always` all, the longest first."""
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
        found = await self._store.find(keys)
        sources = []
        runs = {found.dram_blocks: 0.0, found.blocks: found.ssd_s}  # blocks, and until they are in DRAM
        size = self._geometry.pool_bytes
        for count, ssd_s in runs.items():
            if count:
                load_s = ssd_s + max(self._way_s(count * size), self._homes_s(keys[:count], count * size))
                sources.append(self._source(POOL, keys[:count], first, load_s, size, self._pool_blocks.get))
        return sources

    def _others(self, keys: Sequence[BlockKey], first: int, pooled: int) -> list[Source]:
        """The best of the other arenas: who has more, or has it behind a faster way."""
        if self._arenas is None or self._borrowing is None:
            return []
        sources, size = [], self._geometry.block_bytes
        for node, count in self._arenas.beyond(keys, first, pooled).items():
            load_s = max(self._way_s(count * size), self._node_s(node, count * size))
            get = partial(self._borrowing.get, node)
            sources.append(self._source(node, keys[first : first + count], first, load_s, size, get))
        return sorted(sources, key=lambda source: source.saved_s, reverse=True)[:1]

    def _way_s(self, nbytes: int) -> float:
        return self._way.estimate(self._coming + nbytes)

    def _source(
        self, name: str, keys: Sequence[BlockKey], first: int, load_s: float, block_bytes: int, get: Get
    ) -> Source:
        size = self._geometry.block_size
        compute_s = self._costs.prefill.estimate(len(keys) * size, first * size)
        weight = 1.0 if name == POOL else LENT
        return Source(name, keys, load_s, compute_s - weight * load_s, block_bytes, get)

    @contextmanager
    def loading(self, num_bytes: int) -> Iterator[int]:
        """So much is on its way while this is open; gives the bytes that were on theirs before."""
        before = self._coming
        self._coming += num_bytes
        try:
            yield before
        finally:
            self._coming -= num_bytes

    def observe(self, result: GetResult, before: int, seconds: float) -> None:
        """A load took so long, behind `before` bytes. With blocks out of SSD that is not the time of the way alone."""
        if result.nbytes and "ssd" not in result.tiers:
            self._way.observe(before + result.nbytes, seconds)
