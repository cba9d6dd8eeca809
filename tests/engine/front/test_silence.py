"""Signs of life over real channels: a node that answers is not suspected, one that is stopped is."""

from __future__ import annotations

import asyncio

from engine.front.silence import ALIVE, SignsOfLife
from net.channel.channel import Channel


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.005)


async def test_only_a_node_that_does_not_answer_is_suspected():
    """`b` answers; `c` takes the questions and is stuck; `old` does not know the question, and lives."""
    awaited, suspected, stuck = {"b", "c", "old", "a"}, list[str](), asyncio.Event()
    channels = {name: Channel(name, {}) for name in ("a", "b", "c", "old")}
    asked: list[str] = []

    async def answer(peer: str, body: dict, data: memoryview) -> None:
        asked.append(peer)

    async def hang(peer: str, body: dict, data: memoryview) -> None:
        await stuck.wait()

    try:
        for name, channel in channels.items():
            channels["a"].introduce(name, await channel.start("127.0.0.1"))
        signs = SignsOfLife(channels["a"], lambda: awaited, suspected.append)
        channels["b"].handle(ALIVE, answer)
        channels["c"].handle(ALIVE, hang)
        signs.watch()
        await until(lambda: suspected)
        assert suspected == ["c"] and signs.late("c") and not signs.late("b") and not signs.late("old")
        assert len(asked) > 2, "and it is asked again while it says nothing"
        stuck.set()
        await until(lambda: not signs.late("c"))
        awaited.clear()  # the requests are over, and nobody is asked any more
        await until(lambda: signs._task is not None and signs._task.done())
        before = len(asked)
        await asyncio.sleep(0.2)
        assert len(asked) == before
    finally:
        stuck.set()
        for channel in channels.values():
            await channel.close()
