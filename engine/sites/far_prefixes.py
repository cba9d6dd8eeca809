"""FarPrefixes: prefixes from the pools of other sites, at a price and within a budget.

price      wait for the budget of the link + distance + bytes / bandwidth; latency and bandwidth of a link are
           learned from its transfers, and until there are some of the last minute the bandwidth is that of the budget
question   a site is asked only if even all of the missing blocks would come sooner than this node computes them,
           and for no longer than computing them takes; a site that did not answer is left alone for a while, unless
           the next question has more time
budget     every prefill node of a site has an equal part of each link's budget (cache/sites/budget.py); transfers take
           their tokens in the order in which they ask, and one that waits much longer than it had to expect gives up
copies     a block that crosses for the second time within the TTL is published at this site (cache/sites/copies.py)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field

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
from sched.placement.sites.distances import MEASURE_S, Distances

WAY_S = 60.0
"""What transfers have told of a link counts for this long after the last one: a link that seemed slow is not used, and
so would never be found to be fast again."""

PATIENCE = 4.0
"""A fetch waits for the budget up to this multiple of the time that it takes by what is booked when it begins."""


@dataclass(frozen=True, slots=True)
class FarRun:
    """Leading blocks that the pool of another site has, and the estimated seconds until they are here."""

    site: str
    blocks: int
    load_s: float


@dataclass(frozen=True, slots=True)
class LinkRules:
    """`own`: this site; `bytes_per_s`: the budget of each link from another site, for this site's readers together;
    `readers()`: how many they are; `ttl_s`: of copies."""

    own: str
    bytes_per_s: float
    readers: Callable[[], int]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that never go back, and a pause."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(slots=True)
class _Link:
    """From one other site. `turn`: of the fetch that waits for the budget, first come, first served. `way` was learned
    until `heard_at`. `silent`: when a question had no answer, and how long it waited."""

    budget: LinkBudget
    way: TransferModel
    heard_at: float
    silent: tuple[float, float] = (-math.inf, 0.0)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        clock: Clock = Clock(),
    ) -> None:
        """each: blocks of the pool in one block of this node."""
        self._store, self._pool_blocks, self._rules, self._each = store, pool_blocks, rules, each
        self._publish, self._metrics, self._clock = publish, metrics, clock
        self._copies = SecondHit[BlockKey](rules.ttl_s)
        self._links: dict[str, _Link] = {}
        self._trips = Distances(rules.own)  # of the questions
        self._parts = 0

    async def of(self, keys: Sequence[BlockKey], compute_s: Callable[[int], float], block_bytes: int) -> list[FarRun]:
        """What other sites have of `keys`, the blocks that this site lacks, as far as a fetch is shorter than computing
        it here. compute_s(blocks): seconds to compute that number of them."""
        if not keys:
            return []
        now, whole_s, worth = self._clock.now(), compute_s(len(keys)), []
        for site in self._store.other_sites.names():
            # The last round trip of a quiet link may be of another time, and only a question can tell.
            asking_s = 0.0 if self._trips.stale(now, site) else self._trips.of(now, site)
            silent_at, waited_s = self._link(site, block_bytes).silent
            if now - silent_at < MEASURE_S and whole_s <= waited_s:
                continue
            whole = self._load(site, len(keys), compute_s, block_bytes)
            if whole is not None and whole.load_s + asking_s < whole_s:
                worth.append(site)
        runs = await asyncio.gather(*(self._run(self._links[site], site, keys, whole_s) for site in worth))
        found = zip(worth, runs, strict=True)
        loads = [self._load(site, run, compute_s, block_bytes) for site, run in found if run]
        return [load for load in loads if load is not None]

    async def _run(self, link: _Link, site: str, keys: Sequence[BlockKey], patience_s: float) -> int:
        begin = self._clock.now()
        found = await self._store.other_sites.find(site, pooled_keys(keys), patience_s)
        now = self._clock.now()
        if found is None:  # the time that this took is no distance
            link.silent = now, patience_s
            return 0
        self._trips.observe(now, site, now - begin)
        return found // self._each

    def _load(self, site: str, blocks: int, compute_s: Callable[[int], float], block_bytes: int) -> FarRun | None:
        """None: computing these blocks takes no longer."""
        nbytes, link = blocks * block_bytes, self._link(site, block_bytes)
        wait_s = link.budget.wait_s(self._clock.now(), nbytes)
        computed_s = compute_s(blocks)
        saved_s = far_saves_s(computed_s, link.way, nbytes, wait_s)
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
        link = self._link(site, block_bytes)
        budget, left = link.budget, len(keys) - near
        budget.book(left * block_bytes)
        expected_s = budget.wait_s(self._clock.now(), 0) + left * block_bytes / budget.bytes_per_s
        patience_s = PATIENCE * expected_s
        try:
            while left:
                asked = self._clock.now()
                count = await self._paid(link, left, block_bytes, asked + patience_s)
                left -= count
                if not count:
                    break
                begin = self._clock.now()
                patience_s -= begin - asked
                first = len(keys) - left - count
                part = slice(first, first + count)
                result = await self._pool_blocks.get(keys[part], block_ids[part], site)
                if result.nbytes:
                    self._learn(site, block_bytes, result.nbytes, begin)
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

    async def _paid(self, link: _Link, left: int, block_bytes: int, until: float) -> int:
        """Wait until the budget gives a part of the `left` blocks that are booked. Returns their number; they are not
        booked any more. 0: it was not their turn by `until`."""
        async with link.turn:
            while True:
                self._divide()
                # The bucket changes while this waits: nodes come and go.
                count = link.budget.at_once(left)
                nbytes, now = count * block_bytes, self._clock.now()
                if link.budget.take(now, nbytes):
                    link.budget.unbook(nbytes)
                    return count
                if now >= until:
                    return 0
                await self._clock.sleep(link.budget.pause_s(nbytes))

    def arrived(self, near: int, named: Sequence[Named]) -> None:
        """These blocks are in the arena; all but the first `near` came from another site."""
        far = named[near:]
        admitted = self._copies.crossed(self._clock.now(), [key for key, _, _ in far])
        self._publish([row for row, copied in zip(far, admitted, strict=True) if copied])

    def came(self, key: BlockKey) -> bool:
        """Whether this block came from another site, and was not computed here since."""
        return key in self._copies

    def computed(self, keys: Sequence[BlockKey]) -> None:
        """These were computed at this site."""
        self._copies.forget(keys)

    def _divide(self) -> None:
        parts = max(1, self._rules.readers())
        if parts != self._parts:
            self._parts, now = parts, self._clock.now()
            for link in self._links.values():
                link.budget.divided(now, parts)

    def _link(self, site: str, block_bytes: int) -> _Link:
        self._divide()
        now = self._clock.now()
        link = self._links.get(site)
        if link is None:
            link = self._links[site] = _Link(LinkBudget(self._rules.bytes_per_s, block_bytes), self._new_way(), now)
            link.budget.divided(now, self._parts)
        if now - link.heard_at > WAY_S:
            link.way, link.heard_at = self._new_way(), now
        return link

    def _learn(self, site: str, block_bytes: int, nbytes: int, begin: float) -> None:
        link = self._link(site, block_bytes)
        link.heard_at = self._clock.now()
        link.way.observe(nbytes, link.heard_at - begin)

    def _new_way(self) -> TransferModel:
        return TransferModel(bytes_per_s=self._rules.bytes_per_s)
