"""FarPrefixes: prefixes from the pools of other sites, at a price and within a budget.

price      wait for the budget of the link + distance + bytes / bandwidth; latency and bandwidth of a link are
           learned from its transfers, and until there are some the bandwidth is that of the budget
question   a site is asked only if even all of the missing blocks would come sooner than this node computes them,
           and for no longer than computing them takes
budget     every node of a site has an equal part of each link's budget (cache/sites/budget.py)
copies     a block that crosses for the second time within the TTL is published at this site (cache/sites/copies.py)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from cache.block import BlockKey
from cache.keys import pooled_keys
from cache.results import GetResult
from cache.sites.budget import LinkBudget
from cache.sites.copies import SecondHit
from cache.store.calls import HOME_ERRORS
from cache.store.store import Store
from engine.pooled.pool_blocks import PoolBlocks
from engine.pooled.prefetch import total
from engine.step.step import Named
from net.metrics.events import Metrics
from sched.cost import TransferModel
from sched.placement.sites.choice import far_saves_s
from sched.placement.sites.distances import Distances

LEAST_PAUSE_S = 0.001  # between two looks at the budget


@dataclass(frozen=True, slots=True)
class FarRun:
    """Leading blocks that the pool of another site has, and the estimated seconds until they are here."""

    site: str
    blocks: int
    load_s: float


@dataclass(frozen=True, slots=True)
class LinkRules:
    """`bytes_per_s`: the budget of each link from another site, for this site's nodes together; `readers()`: how many
    they are; `ttl_s`: of copies."""

    bytes_per_s: float
    readers: Callable[[], int]
    ttl_s: float


class FarPrefixes:
    """The other sites as one prefill node reads them. `publish(blocks)` publishes copies at this site."""

    def __init__(
        self,
        store: Store,
        pool_blocks: PoolBlocks,
        rules: LinkRules,
        each: int,
        publish: Callable[[Sequence[Named]], None],
        metrics: Metrics,
    ) -> None:
        """each: blocks of the pool in one block of this node."""
        self._store, self._pool_blocks, self._rules, self._each = store, pool_blocks, rules, each
        self._publish, self._metrics = publish, metrics
        self._copies = SecondHit[BlockKey](rules.ttl_s)
        self._budgets: dict[str, LinkBudget] = {}
        self._ways: dict[str, TransferModel] = {}
        self._trips = Distances("")  # of the questions; they go to other sites only
        self._parts = 0

    async def of(self, keys: Sequence[BlockKey], compute_s: Callable[[int], float], block_bytes: int) -> list[FarRun]:
        """What other sites have of `keys`, the blocks that this site lacks, as far as a fetch is shorter than computing
        it here. compute_s(blocks): seconds to compute that number of them."""
        if not keys:
            return []
        now, worth = time.monotonic(), []
        for site in self._store.other_sites.names():
            asking_s = known_s if (known_s := self._trips.of(now, site)) < math.inf else 0.0
            whole = self._load(site, len(keys), compute_s, block_bytes)
            if whole is not None and whole.load_s + asking_s < compute_s(len(keys)):
                worth.append(site)
        runs = await asyncio.gather(*(self._run(site, keys, compute_s(len(keys))) for site in worth))
        found = zip(worth, runs, strict=True)
        loads = [self._load(site, run, compute_s, block_bytes) for site, run in found if run]
        return [load for load in loads if load is not None]

    async def _run(self, site: str, keys: Sequence[BlockKey], patience_s: float) -> int:
        begin = time.monotonic()
        blocks = await self._store.other_sites.find(site, pooled_keys(keys), patience_s) // self._each
        now = time.monotonic()
        self._trips.observe(now, site, now - begin)
        return blocks

    def _load(self, site: str, blocks: int, compute_s: Callable[[int], float], block_bytes: int) -> FarRun | None:
        """None: computing these blocks takes no longer."""
        nbytes = blocks * block_bytes
        wait_s = self._budget(site, block_bytes).wait_s(time.monotonic(), nbytes)
        computed_s = compute_s(blocks)
        saved_s = far_saves_s(computed_s, self._way(site), nbytes, wait_s)
        return FarRun(site, blocks, computed_s - saved_s) if saved_s > 0 else None

    async def get(
        self, site: str, here: Set[BlockKey], block_bytes: int, keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> GetResult:
        """Fetch the blocks that are `here`, leading ones, from the pool of this site and the others from that one, a
        bucket of the budget at a time. Raises HOME_ERRORS."""
        near = sum(key in here for key in keys)
        parts = [await self._pool_blocks.get(keys[:near], block_ids[:near])] if near else []
        if parts and parts[0].blocks < near:
            return parts[0]
        budget = self._budget(site, block_bytes)
        left = len(keys) - near
        budget.book(left * block_bytes)
        try:
            while left:
                first = len(keys) - left
                count = max(1, min(left, int(budget.burst_bytes // block_bytes)))
                left -= count
                await self._paid(budget, count * block_bytes)
                part = slice(first, first + count)
                begin = time.monotonic()
                result = await self._pool_blocks.get(keys[part], block_ids[part], site)
                if result.nbytes:
                    self._way(site).observe(result.nbytes, time.monotonic() - begin)
                    self._metrics.count("mooncake:site_link_bytes", result.nbytes, site=site)
                parts.append(result)
                if result.blocks < count:
                    break
        except HOME_ERRORS:
            if not parts:
                raise
        finally:
            budget.unbook(left * block_bytes)
        return total(parts)

    async def _paid(self, budget: LinkBudget, nbytes: int) -> None:
        """Return when the budget has given `nbytes`, which leave the booked ones."""
        budget.unbook(nbytes)
        pause_s = max(LEAST_PAUSE_S, nbytes / budget.bytes_per_s / 8)
        while not budget.take(time.monotonic(), nbytes):  # noqa: ASYNC110  tokens come with time, and no event tells it
            await asyncio.sleep(pause_s)

    def arrived(self, near: int, named: Sequence[Named]) -> None:
        """These blocks are in the arena; all but the first `near` came from another site."""
        far = named[near:]
        admitted = self._copies.crossed(time.monotonic(), [key for key, _, _ in far])
        self._publish([row for row, copied in zip(far, admitted, strict=True) if copied])

    def _budget(self, site: str, block_bytes: int) -> LinkBudget:
        now, parts = time.monotonic(), max(1, self._rules.readers())
        if site not in self._budgets:
            self._budgets[site] = LinkBudget(self._rules.bytes_per_s, block_bytes)
            self._budgets[site].divided(now, parts)
        if parts != self._parts:
            self._parts = parts
            for budget in self._budgets.values():
                budget.divided(now, parts)
        return self._budgets[site]

    def _way(self, site: str) -> TransferModel:
        return self._ways.setdefault(site, TransferModel(bytes_per_s=self._rules.bytes_per_s))
