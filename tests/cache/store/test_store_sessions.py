"""Blocks of sessions at their homes: evicted first, brought up in time, dropped."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from cache.messages import Park
from cache.server import server
from cache.sessions.parked import Times
from cache.sessions.residence import Residence
from cache.store.store import Store
from net.bodies import BodyError, decode, encode
from tests.cache.pooled import cluster_of, get, key_of, lookup, put, until

NOW = Times(0.0, math.inf, math.inf, math.inf)
BACK = Times(0.0, 0.0, math.inf, math.inf)
OVER = Times(0.0, math.inf, math.inf, 0.0)


def keys(numbers: range) -> list[bytes]:
    return [key_of(i) for i in numbers]


async def parked(home: Store, client: Store, numbers: range, times: Times, session: int = 1) -> None:
    """The home has heard of it, and has done what was due."""
    client.park(keys(numbers), session, times)
    await until(lambda: home.stats()["share"]["parked"] > 0 or not (times.over_s or times.up_s))
    await home.keeper._move_sessions(asyncio.get_running_loop().time())


async def in_dram(home: Store) -> set[bytes]:
    local = home.local
    return {key for key in map(key_of, range(20)) if local.contains(key) == "dram"}


async def moved_down(home: Store, client: Store, numbers: range) -> None:
    """The blocks of a session whose turn is over; 8 others, which are nobody's, fill DRAM."""
    await put(client, numbers)
    await home.local.drain()
    await parked(home, client, numbers, NOW)
    await put(client, range(numbers.stop, numbers.stop + 8))
    await home.local.drain()


async def test_a_parked_session_gives_way_before_older_blocks(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        for numbers in (range(4), range(4, 8)):  # older ones, and those of the session
            await put(client, numbers)
            await home.local.drain()
        await parked(home, client, range(4, 8), NOW)
        await put(client, range(8, 12))
        await home.local.drain()
        assert await in_dram(home) == {*keys(range(4)), *keys(range(8, 12))}
        found = await client.find(keys(range(4, 8)))
        assert (found.blocks, found.ssd_blocks) == (4, 4), "parked on SSD"


async def test_blocks_come_up_from_ssd_before_they_are_read(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        await moved_down(home, client, range(4))
        home.keeper._residence = Residence(8)  # those evictions say nothing about the next seconds
        assert not await in_dram(home) & {*keys(range(4))}
        await parked(home, client, range(4, 8), NOW, session=2)  # theirs is the room
        home.keeper.start()
        try:
            client.park(keys(range(4)), 1, BACK)
            await until(lambda: home.keeper.stats()["session_raised"] == 4)
        finally:
            await home.keeper.close()
        await home.local.drain()
        assert await in_dram(home) >= {*keys(range(4))}
        result = await get(client, range(4))
        assert result.tiers == {"dram": 4}, "the disk is not on the way of the request"
        assert home.stats()["share"]["parked"] == 4, "those of the other session"


async def over(home: Store, client: Store, numbers: range) -> int:
    """Blocks that the home has dropped when it knows that this session is over."""
    await parked(home, client, numbers, OVER)
    await home.keeper._move_sessions(asyncio.get_running_loop().time())
    return home.keeper.stats()["session_dropped"]


async def test_blocks_of_a_session_that_does_not_return_are_dropped_when_the_tier_is_nearly_full(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        await put(client, range(6))
        await home.local.drain()
        assert await over(home, client, range(4)) == 0
        assert await lookup(client, range(6)) == 6, "there is room"
        number = 100
        while not home.local.is_nearly_full:
            await put(client, [number := number + 1])
            await home.local.drain()
        await home.keeper._move_sessions(asyncio.get_running_loop().time())
        assert home.keeper.stats()["session_dropped"] == 4
        assert await lookup(client, range(4)) == 0 and await lookup(client, range(4, 6)) == 2


async def test_what_was_over_and_is_read_again_stays():
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8)
        await put(client, range(6))
        assert await over(home, client, range(4)) == 0
        assert (await get(client, range(2))).blocks == 2
        await put(client, range(10, 12))
        assert home.local.is_nearly_full
        await home.keeper._move_sessions(asyncio.get_running_loop().time())
        assert home.keeper.stats()["session_dropped"] == 2
        assert await lookup(client, range(2)) == 2 and await lookup(client, range(2, 4)) == 0


async def test_blocks_come_up_only_into_room_that_nothing_else_needs(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        await moved_down(home, client, range(4))
        client.park(keys(range(4)), 1, BACK)
        await until(lambda: home.stats()["share"]["parked"] == 4 and home.keeper._share.parked._order)
        await home.keeper._move_sessions(asyncio.get_running_loop().time())
        assert home.keeper.stats()["session_raised"] == 0, "the blocks there were used, and are no session's"


async def test_blocks_of_a_session_that_are_in_dram_stay_even_if_there_is_no_room_for_the_others(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        for numbers in (range(4), range(4, 8), range(8, 12)):  # the first four are on SSD alone
            await put(client, numbers)
            await home.local.drain()
        await parked(home, client, range(8), BACK)
        assert home.keeper.stats()["session_raised"] == 0, "no room"
        await put(client, range(12, 16))
        await home.local.drain()
        assert await in_dram(home) == {*keys(range(4, 8)), *keys(range(12, 16))}


async def test_blocks_are_parked_a_few_at_a_time_whatever_the_number_of_messages(monkeypatch):
    monkeypatch.setattr(server, "PARKED_AT_ONCE", 4)
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home")
        await put(client, range(30))
        for session, numbers in enumerate((range(10), range(10, 20), range(20, 30))):
            client.park(keys(numbers), session, NOW)
        counts = [0]
        async with asyncio.timeout(20):
            while counts[-1] < 30:
                await asyncio.sleep(0)
                counts.append(home.stats()["share"]["parked"])
        steps = [after - before for before, after in itertools.pairwise(counts)]
        assert 0 < max(steps) <= 4 and sum(steps) == 30


async def test_the_keeper_looks_by_itself_and_only_what_is_here_is_parked(tmp_path):
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=8, directory=tmp_path)
        await put(client, range(4))
        await home.local.drain()
        home.keeper.start()
        try:
            client.park(keys(range(100)), 1, NOW)
            await until(lambda: client.stats() and home.keeper.sessions()["aside"] == 4)
            assert home.keeper.sessions() == {"parked": 4, "aside": 4, "over": 0, "raised": 0, "dropped": 0}
        finally:
            await home.keeper.close()


async def test_each_home_hears_of_its_own_blocks():
    async with cluster_of("client", slots=0) as cluster:
        client = cluster.stores["client"]
        for name in "abc":
            await cluster.add(name)
        await put(client, range(30))
        client.park(keys(range(30)), 1, NOW)
        shares = [cluster.stores[name].stats for name in "abc"]
        await until(lambda: sum(stats()["share"]["parked"] for stats in shares) == 30)
        assert all(stats()["share"]["parked"] > 0 for stats in shares)


async def test_without_ssd_parked_blocks_are_evicted_first():
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", slots=4)
        await put(client, range(4))
        await parked(home, client, range(2, 4), NOW)
        await put(client, range(4, 6))
        assert await lookup(client, range(2)) == 2 and await lookup(client, range(2, 4)) == 0


@pytest.mark.parametrize("times", [NOW, BACK, OVER, Times(1.5, 2.0, 3.25, 1e6)])
def test_times_cross_the_wire(times):
    assert decode(Park, encode(Park.at(7, times))).times() == times


@pytest.mark.parametrize("wrong", [{"session": -1}, {"down_ms": -2}, {"over_ms": -9}])
def test_impossible_times_are_refused(wrong):
    body = {"session": 1, "down_ms": 0, "up_ms": 0, "late_ms": 0, "over_ms": 0} | wrong
    with pytest.raises(BodyError):
        decode(Park, body)
