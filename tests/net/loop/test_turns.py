"""Tasks continue in order, a few per turn of the event loop, and a cancelled one costs nobody a turn."""

from __future__ import annotations

import asyncio

from net.loop.turns import Turns


async def test_few_per_turn_and_in_order():
    turns, order = Turns(2), []

    async def one(number: int) -> None:
        await turns.take()
        order.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(9)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    before = 0
    while len(order) < 8:
        await asyncio.sleep(0)
        assert len(order) - before <= 2
        before = len(order)
    assert order == [0, 1, 2, 3, 5, 6, 7, 8]
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_queue_that_was_empty_begins_again():
    turns = Turns(1)
    for _ in range(3):
        await asyncio.wait_for(asyncio.gather(turns.take(), turns.take()), 10)
