"""Prefixes of other sites: asked for only if they can pay, fetched within the budget, copied on the second hit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pytest

from cache.block import BlockGeometry, BlockKey
from cache.results import GetResult, LeadingRun
from engine.core.costs import StepCosts
from engine.handoff.prefix_sources import PrefixSources, Prices
from engine.sites.far_prefixes import PATIENCE, WAY_S, Clock, FarPrefixes, LinkRules
from net.metrics.events import Metrics
from sched.placement.sites.distances import MEASURE_S

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
BLOCK = GEOMETRY.pool_bytes
KEYS = [blake2b(bytes([i]), digest_size=16).digest() for i in range(40)]


class World:
    """The pools of this site and of others: as many leading KEYS as `here` and `there` say. Time passes only while
    somebody waits: `answer_s` for an answer, `carry_s` for the bytes of another site."""

    def __init__(self, there: dict[str, int], here: int = 0, bytes_per_s: float = 1e9, readers: int = 1) -> None:
        self.there, self.here = there, here
        self.asked: list[str] = []
        self.gets: list[tuple[str | None, int, float]] = []  # site, blocks, time
        self.published: list[BlockKey] = []
        self.other_sites = self
        self.readers = readers
        self.now, self.answer_s, self.carry_s = 100.0, 0.0, 1e-6
        self.naps = 0
        self.on_nap = lambda: None
        self.far = FarPrefixes(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            LinkRules("a", bytes_per_s, lambda: self.readers, 60.0),
            1,
            lambda rows: self.published.extend(key for key, _, _ in rows),
            Metrics("m", "n"),
            Clock(lambda: self.now, self.nap),
        )

    async def nap(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        self.on_nap()
        await asyncio.sleep(0)

    def names(self) -> list[str]:
        return list(self.there)

    async def find(self, *question: Any) -> Any:
        """Of the pool of this site, and of another one."""
        if len(question) == 1:
            return LeadingRun(self.here, self.here)
        site, keys, timeout_s = question
        self.asked.append(site)
        self.now += min(timeout_s, self.answer_s)
        if self.answer_s > timeout_s:
            return None
        return max(0, self.there[site] - KEYS.index(keys[0]))

    async def get(self, keys: Sequence[BlockKey], block_ids: Sequence[int], site: str | None = None) -> GetResult:
        self.gets.append((site, len(keys), self.now))
        if site is not None:
            self.now += self.carry_s
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
        distant.far._link("b", BLOCK).way.observe(BLOCK, 0.1)
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
    world.far._link("b", BLOCK).budget.book(BLOCK * 2000)
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


async def test_a_question_without_an_answer_is_no_distance():
    """A link that was cut for a while: uniform prompts ask again once it has been left alone for a while."""
    world = World({"b": 40})
    world.answer_s = 60.0
    assert await world.runs() == []
    assert await world.runs() == [], "it is not asked at every request"
    assert world.asked == ["b"]
    world.answer_s = 0.001
    world.now += MEASURE_S
    assert await world.runs() == [("b", 40)]


async def test_a_site_that_did_not_answer_is_asked_by_a_request_with_more_time():
    world = World({"b": 40})
    world.answer_s = 0.1
    assert await world.runs(first=30) == [], "40 ms are too short for an answer"
    assert await world.runs() == [("b", 40)]


async def test_the_round_trip_of_a_quiet_link_counts_no_more():
    world = World({"b": 40})
    world.answer_s = 0.15
    assert await world.runs() == [("b", 40)]
    world.answer_s = 0.001
    assert await world.runs(first=15) == [], "100 ms to compute, 150 ms to ask"
    assert world.asked == ["b"]
    world.now += MEASURE_S
    assert await world.runs(first=15) == [("b", 25)]


async def test_a_link_that_was_slow_is_tried_again_after_a_minute():
    world = World({"b": 40})
    world.carry_s = 5.0
    for _ in range(8):
        await world.far.get("b", frozenset(), BLOCK, KEYS, range(40))
    world.carry_s = 0.0
    assert await world.runs() == []
    world.now += WAY_S / 2
    assert await world.runs() == []
    world.now += WAY_S / 2 + 1
    assert await world.runs() == [("b", 40)]


async def test_a_reader_that_joins_during_a_fetch_shrinks_the_parts_that_cross():
    rate = BLOCK * 40.0  # the bucket holds 20 blocks, and 5 when it is divided
    world = World({"b": 40}, bytes_per_s=rate)

    def joined() -> None:
        world.readers = 4

    world.on_nap = joined
    result = await world.far.get("b", frozenset(), BLOCK, KEYS, range(40))
    assert result.blocks == 40
    assert [count for _, count, _ in world.gets] == [20, 5, 5, 5, 5]
    (_, _, first), *later = world.gets
    assert later[-1][2] - later[0][2] >= 15 * BLOCK / (rate / 4) - 1e-6, "at its part of the rate"
    assert first == 100.0


async def test_bytes_that_wait_for_the_budget_are_seen_by_the_next_request():
    world, seen = World({"b": 40}, bytes_per_s=BLOCK * 40.0), []
    budget = world.far._link("b", BLOCK).budget
    world.on_nap = lambda: seen.append(budget._booked / BLOCK)
    await world.far.get("b", frozenset(), BLOCK, KEYS, range(40))
    assert seen and set(seen) == {20.0}, "the second bucket is booked for as long as it waits"
    assert budget._booked == 0


async def test_a_large_part_is_not_overtaken_by_small_ones():
    world = World({"b": 40}, bytes_per_s=BLOCK * 40.0)
    fetches = [world.far.get("b", frozenset(), BLOCK, KEYS[:n], range(n)) for n in (20, 20, 1, 1, 1)]
    await asyncio.gather(*fetches)
    assert [count for _, count, _ in world.gets] == [20, 20, 1, 1, 1]


async def test_a_fetch_that_waits_far_longer_than_it_had_to_expect_gives_up():
    world = World({"b": 40}, bytes_per_s=BLOCK * 40.0)

    def crowd() -> None:
        world.readers = 1000

    world.on_nap = crowd
    begin = world.now
    result = await world.far.get("b", frozenset(), BLOCK, KEYS, range(40))
    assert result.blocks == 20 + 1, "the first bucket, and the one block for which the divided bucket had tokens"
    expected_s = 1.0 + 0.5  # its own bytes, and those that the bucket lacked
    assert PATIENCE * expected_s <= world.now - begin
    link = world.far._link("b", BLOCK)
    assert link.budget._booked == 0 and not link.turn.locked()


async def test_a_fetch_that_is_cancelled_while_it_waits_leaves_no_bytes_booked():
    world, waiting = World({"b": 40}, bytes_per_s=BLOCK * 40.0), asyncio.Event()
    world.on_nap = waiting.set
    fetch = asyncio.create_task(world.far.get("b", frozenset(), BLOCK, KEYS, range(40)))
    await waiting.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    link = world.far._link("b", BLOCK)
    assert link.budget._booked == 0 and not link.turn.locked()


async def test_a_block_that_crossed_is_known_until_it_is_computed_here():
    world = World({"b": 30})
    named: list[Any] = [(key, i, None) for i, key in enumerate(KEYS[:30])]
    world.far.arrived(20, named)
    assert [key for key in KEYS if world.far.came(key)] == KEYS[20:30]
    world.far.computed(KEYS[:25])
    assert [key for key in KEYS if world.far.came(key)] == KEYS[25:30]
