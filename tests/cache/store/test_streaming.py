"""A long prefix in windows: their sizes, what is under way, and who stops it."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cache.results import GetResult
from cache.store.streaming import FIRST_BYTES, GROWTH, WINDOW_S, Windows, stream


class Pool:
    """Has blocks 0 to `held` - 1; a window arrives when `gate` lets it."""

    def __init__(self, held: int) -> None:
        self.held = held
        self.begun: list[slice] = []
        self.stopped: list[slice] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, part: slice) -> GetResult:
        self.begun.append(part)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped.append(part)
            raise
        blocks = max(0, min(part.stop, self.held) - part.start)
        return GetResult(blocks, blocks)


@given(st.integers(1, 1 << 22), st.integers(1, 500), st.lists(st.floats(0, 10), max_size=10))
def test_a_window_is_what_should_take_its_time(block_bytes, most, times):
    windows = Windows(block_bytes, most)
    assert windows.blocks == max(1, min(most, FIRST_BYTES // block_bytes))
    for seconds in times:
        before = windows.blocks
        windows.took(before, seconds)
        assert 1 <= windows.blocks <= min(most, GROWTH * before)
        if seconds > WINDOW_S:
            assert windows.blocks <= before, "over a slow link they get smaller"
        elif seconds * GROWTH * 2 < WINDOW_S:
            assert windows.blocks >= min(most, before), "over a fast one larger"


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_windows_follow_each_other_until_one_is_short(count, held, most):
    async def run() -> None:
        pool = Pool(held)
        results = [one async for one in stream(pool.fetch, count, Windows(1, most))]
        assert sum(result.blocks for result in results) == min(count, held)
        assert [part.start for part in pool.begun] == [0, *(part.stop for part in pool.begun)][: len(pool.begun)]
        assert all(part.stop - part.start <= most for part in pool.begun)
        whole = [result.blocks == part.stop - part.start for result, part in zip(results, pool.begun, strict=True)]
        assert all(whole[:-1])

    asyncio.run(run())


async def test_the_next_window_is_on_its_way_while_the_reader_works():
    pool = Pool(100)
    parts = stream(pool.fetch, 100, Windows(1, 10))
    first = await anext(parts)
    await asyncio.sleep(0)
    assert first.blocks == 10
    assert len(pool.begun) == 2
    pool.gate.clear()
    assert (await anext(parts)).blocks == 10, "it had come"
    await asyncio.sleep(0)
    waiting = asyncio.create_task(anext(parts))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool.stopped == [slice(20, 30)]


async def test_who_leaves_early_stops_what_is_under_way():
    pool = Pool(100)
    parts = stream(pool.fetch, 100, Windows(1, 10))
    await anext(parts)
    await asyncio.sleep(0)
    pool.gate.clear()
    await anext(parts)
    await asyncio.sleep(0)
    await parts.aclose()
    assert pool.stopped == [slice(20, 30)]
