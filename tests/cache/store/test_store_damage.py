"""Blocks that a reader reports as damaged: nobody reads them again before their home has inspected them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cache.tiers.local_store import LocalStore
from tests.cache.pooled import SLOT, Cluster, cluster_of, get, key_of, lookup, of_home, put, until


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No block is inspected before this is set."""
    event, verify = asyncio.Event(), LocalStore.verify

    async def later(local: LocalStore, key: bytes) -> bool:
        await event.wait()
        return await verify(local, key)

    monkeypatch.setattr(LocalStore, "verify", later)
    return event


@asynccontextmanager
async def two_nodes(go: asyncio.Event, **options: Any) -> AsyncIterator[Cluster]:
    """The cluster does not close before all reports are inspected."""
    async with cluster_of("a", "b", **options) as cluster:
        try:
            yield cluster
        finally:
            go.set()


def damage(store, number):
    store.local.arena.memory(store.local._pool.lookup(key_of(number)))[100] ^= 1


@pytest.mark.parametrize("message_bytes", [0, SLOT], ids=["leased", "by message"])
async def test_a_reported_block_is_a_miss_until_it_is_inspected(go, message_bytes):
    async with two_nodes(go, message_block_bytes=message_bytes) as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        numbers = of_home(cluster, "b", 4)
        await put(a, numbers)
        damage(b, numbers[1])
        assert (await get(a, numbers)).blocks == 1
        for _ in range(3):
            await asyncio.sleep(0)
            assert await lookup(a, numbers) == 1
            assert (await get(a, numbers)).blocks == 1
            async with a.pinned([key_of(number) for number in numbers]) as pinned:
                assert pinned is None
        assert a.stats()["corrupt"] == 1, "the damaged bytes travelled once"
        go.set()
        await until(lambda: b.local.contains(key_of(numbers[1])) is None)
        assert await lookup(a, numbers[2:]) == 2
        assert await put(a, numbers) == 1
        assert (await get(a, numbers)).blocks == 4


async def test_a_whole_block_that_was_reported_comes_back(go):
    async with two_nodes(go) as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        numbers = of_home(cluster, "b", 4)
        await put(a, numbers)
        for _ in range(2):  # a second report of the same blocks changes nothing
            cluster.hub.channels["a"].post("b", "store.bad", {}, [key_of(number) for number in numbers])
        await until(lambda: key_of(numbers[0]) in b.local.inspection)
        assert await lookup(a, numbers) == 0 == (await get(a, numbers)).blocks
        assert await put(a, numbers) == 0, "they are still here"
        go.set()
        await until(lambda: not any(key_of(number) in b.local.inspection for number in numbers))
        assert (await get(a, numbers)).blocks == 4
        assert b.local.stats()["dram"]["corrupt"] == 0
