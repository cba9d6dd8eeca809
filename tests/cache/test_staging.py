"""Slots of the staging area: every caller gets its own, whoever comes or gives up while others wait."""

from __future__ import annotations

import asyncio
import random

import pytest

from cache.staging import Staging


class Users:
    """Callers that hold slots until told to give them back."""

    def __init__(self, slots: int) -> None:
        self.staging = Staging(16, 16 * slots)
        self.held: dict[int, list[int]] = {}

    def start(self, name: int, count: int, over: asyncio.Event) -> asyncio.Task[None]:
        async def use() -> None:
            async with self.staging.slots(count) as offsets:
                self.held[name] = offsets
                taken = [offset for some in self.held.values() for offset in some]
                assert len(offsets) == count and len(set(taken)) == len(taken)
                try:
                    await over.wait()
                finally:
                    del self.held[name]

        return asyncio.create_task(use())

    async def all_free(self) -> bool:
        """Whether one caller can have all slots."""
        async with asyncio.timeout(10), self.staging.slots(self.staging.num_slots) as offsets:
            return sorted(offsets) == [16 * slot for slot in range(self.staging.num_slots)]


async def test_a_caller_that_comes_before_a_waiter_runs_takes_none_of_its_slots():
    users, over, later = Users(4), asyncio.Event(), asyncio.Event()
    first = users.start(0, 4, over)
    await asyncio.sleep(0)
    waiter = users.start(1, 4, over)
    await asyncio.sleep(0)
    over.set()
    late = users.start(2, 1, later)  # it runs in the turn of the loop in which the first one ends
    await asyncio.gather(first, waiter)
    later.set()
    await late
    assert await users.all_free()


async def test_those_behind_a_waiter_that_gives_up_get_what_is_free():
    users, over = Users(4), asyncio.Event()
    holds = users.start(0, 2, over)
    await asyncio.sleep(0)
    many, few = users.start(1, 4, over), users.start(2, 2, over)
    await asyncio.sleep(0)
    assert list(users.held) == [0]
    many.cancel()
    await asyncio.gather(many, return_exceptions=True)
    assert list(users.held) == [0, 2]
    over.set()
    await asyncio.gather(holds, few)
    assert await users.all_free()


@pytest.mark.parametrize("seed", range(5))
async def test_callers_that_come_end_and_give_up_at_any_moment(seed):
    users, drawn = Users(4), random.Random(seed)
    running: list[tuple[asyncio.Task[None], asyncio.Event]] = []
    for name in range(200):
        over = asyncio.Event()
        running.append((users.start(name, drawn.randint(1, 4), over), over))
        for _ in range(drawn.randint(0, 3)):
            task, ended = drawn.choice(running)
            drawn.choice([ended.set, ended.set, task.cancel])()
            if drawn.random() < 0.5:
                await asyncio.sleep(0)
    for _, ended in running:
        ended.set()
    for result in await asyncio.gather(*(task for task, _ in running), return_exceptions=True):
        assert result is None or isinstance(result, asyncio.CancelledError), result
    assert await users.all_free()
