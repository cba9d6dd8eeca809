"""Lodgings in a LocalStore: blocks stay until their owner gives them up, and are blocks of the store meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

from cache.arena import Arena, checksum
from cache.pool.policy import Facts
from cache.ssd import SsdTier
from cache.tiers.local_store import LocalStore, NoSpace
from net.transfer.common.memory import Region

SLOT, SLOTS = 3000, 8


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def block_of(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


def put(store: LocalStore, i: int) -> None:
    slot = store.reservations.reserve(key_of(i))
    assert slot is not None
    fill(store, i, slot)
    store.commit(key_of(i), slot, checksum(block_of(i)))


def fill(store: LocalStore, i: int, slot: int) -> None:
    store.arena.memory(slot)[:] = block_of(i)


@pytest.fixture(params=[False, True], ids=["dram", "dram and ssd"])
def store(request, tmp_path):
    region = Region.shared("lodging", SLOT * SLOTS)
    ssd = SsdTier(tmp_path, SLOT, 1 << 20, b"r" * 16, sync_ms=10) if request.param else None
    made = LocalStore(Arena(region, SLOT), ssd)
    yield made
    region.close()


def run(store: LocalStore, test) -> None:
    async def whole() -> None:
        await test(store)
        await store.drain()
        store.check_integrity()
        assert store.stats()["dram"]["held"] == 0
        await store.close()

    asyncio.run(whole())


def test_what_it_fills_is_found_by_others_and_outlives_it_unpinned(store):
    async def test(store):
        lodging = await store.lodge([key_of(0)], 3, Facts(service_class="batch"))
        assert not lodging.found and len(lodging.fresh) == 3
        for i, slot in enumerate(lodging.fresh):
            fill(store, i, slot)
        assert store.contains(key_of(0)) is None
        assert lodging.name(key_of(0), lodging.fresh[0], checksum(block_of(0)), Facts())
        assert store.contains(key_of(0)) == "dram"
        (pin,) = await store.pinning.pin_each([key_of(0)])
        assert bytes(store.arena.memory(pin.slot)) == block_of(0) and pin.checksum == checksum(block_of(0))
        store.pinning.unpin([pin.slot])
        for i in range(10, 10 + SLOTS - 3):  # the others come and go, what is lodged stays
            put(store, i)
        await store.drain()
        for i in range(20, 20 + SLOTS - 3):
            put(store, i)
            await store.drain()
        assert bytes(store.arena.memory(lodging.fresh[2])) == block_of(2), "nobody names it, and nobody takes it"
        lodging.close()
        lodging.close()
        await store.drain()
        assert store.contains(key_of(0)) == "dram" and store.contains(key_of(2)) is None
        for i in range(30, 30 + SLOTS):
            put(store, i)
            await store.drain()
        assert store._pool.lookup(key_of(0)) is None

    run(store, test)


def test_what_is_here_already_is_held_where_it_is(store):
    async def test(store):
        for i in range(4):
            put(store, i)
        lodging = await store.lodge([key_of(i) for i in (0, 1, 9, 2)], 4)
        assert len(lodging.found) == 2 and len(lodging.fresh) == 2, "the leading run"
        assert [bytes(store.arena.memory(slot)) for slot in lodging.found] == [block_of(0), block_of(1)]
        assert not lodging.name(key_of(3), lodging.fresh[0], 1, Facts()), "another copy is here"
        await store.drain()
        await store.remove([key_of(0)])
        assert bytes(store.arena.memory(lodging.found[0])) == block_of(0), "it keeps what it has been given"
        lodging.close()

    run(store, test)


def test_it_says_when_there_is_no_room(store):
    async def test(store):
        assert store.most_lodged == 6
        with pytest.raises(NoSpace, match="7 blocks exceed the 6"):
            await store.lodge([], 7)
        put(store, 1)
        first = await store.lodge([key_of(1)], 6)
        with pytest.raises(NoSpace, match="of 5 blocks have no slot"):
            await store.lodge([key_of(1)], 5)
        first.close()
        (await store.lodge([], 6)).close()

    run(store, test)
