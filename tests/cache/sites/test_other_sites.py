"""Questions to the pools of other sites."""

from __future__ import annotations

import asyncio
from typing import Any

from cache.results import LeadingRun
from cache.sites.other_sites import OtherSites


class Pool:
    def __init__(self) -> None:
        self.answers = asyncio.Event()

    def update(self, now: float, members: object) -> None:
        """It is its own router."""

    async def which(self, keys: Any, *, leading: bool) -> Any:
        await self.answers.wait()
        return self

    def leading(self, count: int) -> LeadingRun:
        return LeadingRun(0, 0)


async def test_no_answer_in_time_is_not_an_answer_that_there_is_nothing():
    pool: Any = Pool()
    sites: OtherSites[Any] = OtherSites(lambda: {"b": {"n": 1}}, lambda: pool, lambda router: pool)
    assert await sites.find("b", [b"k"], 0.01) is None
    pool.answers.set()
    assert await sites.find("b", [b"k"], 60.0) == 0
