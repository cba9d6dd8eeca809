"""Prefixes of other sites: asked for only if they can pay, fetched within the budget, copied on the second hit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pytest

from cache.block import BlockGeometry, BlockKey
from cache.results import GetResult, LeadingRun
from engine.core.costs import StepCosts
from engine.handoff.prefix_sources import PrefixSources, Prices
from engine.sites.far_prefixes import FarPrefixes, LinkRules
from net.metrics.events import Metrics

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
BLOCK = GEOMETRY.pool_bytes
KEYS = [blake2b(bytes([i]), digest_size=16).digest() for i in range(40)]


class World:
    """The pools of this site and of others: as many leading KEYS as `here` and `there` say."""

    def __init__(self, there: dict[str, int], here: int = 0, bytes_per_s: float = 1e9, readers: int = 1) -> None:
        self.there, self.here = there, here
        self.asked: list[str] = []
        self.gets: list[tuple[str | None, int, float]] = []  # site, blocks, time
        self.published: list[BlockKey] = []
        self.other_sites = self
        self.readers = readers
        self.far = FarPrefixes(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            LinkRules(bytes_per_s, lambda: self.readers, 60.0),
            1,
            lambda rows: self.published.extend(key for key, _, _ in rows),
            Metrics("m", "n"),
        )

    def names(self) -> list[str]:
        return list(self.there)

    async def find(self, *question: Any) -> Any:
        """Of the pool of this site, and of another one."""
        if len(question) == 1:
            return LeadingRun(self.here, self.here)
        site, keys, _ = question
        self.asked.append(site)
        return max(0, self.there[site] - KEYS.index(keys[0]))

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        self.gets.append((site, len(keys), time.monotonic()))
        return GetResult(len(keys), len(keys) * BLOCK, {site or "home": len(keys)}, {"tcp": len(keys)}, {"dram": 1})

    def sources(self, policy: str = "auto") -> PrefixSources:
        """Computing a block of 4 tokens takes 4 ms."""
        costs = StepCosts()
        for _ in range(16):
            for tokens in (40, 400):
                costs.prefill.observe(tokens, 0, tokens * 1e-3)
        found = PrefixSources(self, self, None, GEOMETRY, Prices(costs), policy)  # type: ignore[arg-type]
        found.far = self.far
        return found

    async def runs(self, first: int = 0, **options: Any) -> list[tuple[str | None, int]]:
        return [(one.site, len(one.keys)) for one in await self.sources().of(KEYS, first, **options)]


async def test_a_site_with_more_than_this_one_is_a_source_if_its_fetch_is_shorter():
    assert await World({"b": 30}).runs() == [("b", 30)]
    assert await World({"b": 30}, here=20).runs() == [("b", 30), (None, 20)]
    assert await World({"b": 30, "c": 35}).runs(first=10) == [("c", 25), ("b", 20)]


@pytest.mark.parametrize("policy", ["auto", "always"])
async def test_a_link_on_which_a_fetch_takes_longer_than_computing_is_not_even_asked(policy):
    slow = World({"b": 40}, bytes_per_s=BLOCK * 100.0)  # 10 ms a block, against 4 ms to compute it
    assert await slow.sources(policy).of(KEYS, 0) == []
    assert slow.asked == []


async def test_a_short_rest_is_computed():
    distant = World({"b": 40})
    for _ in range(8):
        distant.far._way("b").observe(BLOCK, 0.1)
    assert await distant.runs(first=38) == [], "two blocks take 8 ms, the way 100 ms"


async def test_a_bound_request_asks_no_other_site():
    world = World({"b": 30})
    assert await world.runs(crosses=False) == []
    assert world.asked == []


async def test_what_this_site_has_comes_from_its_own_pool():
    world = World({"b": 30}, here=20)
    source = (await world.sources().of(KEYS, 0))[0]
    result = await source.get(source.keys, list(range(30)))
    assert result.blocks == 30
    assert [(site, count) for site, count, _ in world.gets] == [(None, 20), ("b", 10)]


async def test_a_fetch_in_windows_takes_each_block_from_its_pool():
    """--prefetch timeout fetches windows of a prefix."""
    world = World({"b": 30}, here=20)
    source = (await world.sources().of(KEYS, 0))[0]
    for part in (slice(0, 16), slice(16, 30)):
        await source.get(source.keys[part], list(range(30))[part])
    assert [(site, count) for site, count, _ in world.gets] == [(None, 16), (None, 4), ("b", 10)]


async def test_the_budget_is_never_exceeded_however_many_requests_fetch():
    rate = BLOCK * 400.0
    world = World({"b": 40}, bytes_per_s=rate, readers=2)
    source = (await world.sources().of(KEYS, 0))[0]
    await asyncio.gather(*(source.get(source.keys, list(range(40))) for _ in range(4)))
    own = rate / 2
    burst = max(BLOCK, 0.5 * own)
    for i, (_, _, begin) in enumerate(world.gets):
        crossed = 0
        for _, count, at in world.gets[i:]:
            crossed += count * BLOCK
            assert crossed <= burst + own * (at - begin) + 1
    assert sum(count for _, count, _ in world.gets) == 4 * 40


async def test_booked_bytes_make_the_next_fetch_dear():
    world = World({"b": 40}, bytes_per_s=BLOCK * 1000.0)
    assert await world.runs() == [("b", 40)]
    world.far._budget("b", BLOCK).book(BLOCK * 2000)
    assert await world.runs() == []


async def test_the_second_crossing_makes_copies_of_what_crossed():
    world = World({"b": 30}, here=20)
    source = (await world.sources().of(KEYS, 0))[0]
    assert source.arrived is not None
    named: list[Any] = [(key, i, None) for i, key in enumerate(source.keys)]
    source.arrived(named)
    assert world.published == []
    source.arrived(named)
    assert world.published == KEYS[20:30]
