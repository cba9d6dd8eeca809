"""LocalStore: DRAM over SSD, on a real region and real files, in both backends."""

import asyncio
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import Arena, checksum
from cache.pool.policy import OBJECTS
from cache.ssd import SsdTier, backends
from cache.tiers.local_store import LocalStore, NoSpace, Pin
from net.transfer.common.memory import Region

SLOT = 3000
ROOT = b"r" * 16


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def block_of(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


def put(store: LocalStore, i: int) -> bool:
    """One block in two steps. False: it was there."""
    slot = store.reservations.reserve(key_of(i))
    if slot is None:
        return False
    store.arena.memory(slot)[:] = block_of(i)
    store.commit(key_of(i), slot, checksum(block_of(i)))
    return True


async def put_when_room(store: LocalStore, i: int) -> None:
    while True:
        try:
            put(store, i)
            return
        except NoSpace:
            assert await store.wait_for_room(10)


async def read(store: LocalStore, i: int) -> str | None:
    """The tier block i came from; its content is checked."""
    pins = await store.pinning.pin_each([key_of(i)], leading=True)
    if not pins:
        return None
    (pin,) = pins
    assert bytes(store.arena.memory(pin.slot)) == block_of(i)
    assert pin.checksum == checksum(block_of(i))
    store.pinning.unpin([pin.slot])
    return pin.tier


def assert_idle(store: LocalStore) -> None:
    store.check_integrity()
    assert store.stats()["dram"]["held"] == store.stats()["dram"]["reserved"] == 0


@pytest.fixture(params=sorted(backends), scope="module")
def backend(request):
    return request.param


@pytest.fixture
async def make(tmp_path, backend):
    """Makes stores of `slots` DRAM slots, with an SSD tier unless map_bytes is 0; checks and closes them."""
    made = []

    async def make_store(slots=4, map_bytes=1 << 20, directory=tmp_path / "ssd"):
        region = Region.shared("dram", slots * SLOT)
        ssd = SsdTier(directory, SLOT, map_bytes, ROOT, backend=backend) if map_bytes else None
        made.append((region, LocalStore(Arena(region, SLOT), ssd)))
        return made[-1][1]

    yield make_store
    for region, store in made:
        await store.close()
        assert_idle(store)
        region.close()


@pytest.fixture
def slow_disk(monkeypatch):
    """SSD reads and writes wait for `go`."""
    go = threading.Event()
    for name in ("get", "put_many"):
        work = getattr(SsdTier, name)
        monkeypatch.setattr(SsdTier, name, lambda *args, work=work: (go.wait(30), work(*args))[1])
    yield go
    go.set()


async def test_a_block_is_found_once_committed(make):
    store = await make(map_bytes=0)
    slot = store.reservations.reserve(key_of(1))
    assert store.contains(key_of(1)) is None
    assert await store.pinning.pin_each([key_of(1)], leading=True) == []
    store.arena.memory(slot)[:] = block_of(1)
    store.commit(key_of(1), slot, checksum(block_of(1)))
    assert store.contains(key_of(1)) == "dram"
    assert await read(store, 1) == "dram"


async def test_a_key_is_written_once(make):
    store = await make()
    slot = store.reservations.reserve(key_of(1))
    assert store.reservations.reserve(key_of(1)) is None, "somebody else is writing it"
    store.reservations.abandon(slot)
    assert put(store, 1)
    assert not put(store, 1)
    await store.drain()
    assert store.reservations.reserve(key_of(1)) is None


async def test_commit_needs_the_reservation_of_that_key(make):
    store = await make()
    slot = store.reservations.reserve(key_of(1))
    for key, at in ((key_of(2), slot), (key_of(1), slot + 1)):
        with pytest.raises(ValueError, match="not reserved"):
            store.commit(key, at, 0)
    store.reservations.abandon(slot)
    with pytest.raises(KeyError):
        store.reservations.abandon(slot)
    with pytest.raises(ValueError, match="not reserved"):
        store.commit(key_of(1), slot, 0)


async def test_pinned_and_reserved_slots_are_not_taken(make):
    store = await make(slots=2, map_bytes=0)
    put(store, 1)
    (pin,) = await store.pinning.pin_each([key_of(1)], leading=True)
    reserved = store.reservations.reserve(key_of(2))
    with pytest.raises(NoSpace):
        store.reservations.reserve(key_of(3))
    assert not await store.wait_for_room(10), "no write is under way that could free a slot"
    store.reservations.abandon(reserved)
    assert put(store, 3)
    assert put(store, 4), "3 is evicted, 1 is not"
    assert bytes(store.arena.memory(pin.slot)) == block_of(1)
    store.pinning.unpin([pin.slot])


async def test_more_than_dram_is_kept_on_ssd_and_comes_back(make):
    store = await make(slots=4)
    for i in range(40):
        await put_when_room(store, i)
    await store.drain()
    assert store.count_leading([key_of(i) for i in range(40)]) == 40
    assert await read(store, 39) == "dram"
    assert await read(store, 0) == "ssd"
    assert await read(store, 0) == "dram"
    assert [await read(store, i) for i in range(40)].count(None) == 0


async def test_blocks_are_found_after_a_restart(make):
    store = await make()
    for i in range(10):
        await put_when_room(store, i)
    await store.close()
    store = await make()
    assert [await read(store, i) for i in range(10)] == ["ssd"] * 10


async def test_dram_is_not_evicted_before_its_write_is_done(make, slow_disk):
    store = await make(slots=2)
    put(store, 1)
    put(store, 2)
    with pytest.raises(NoSpace):
        store.reservations.reserve(key_of(3))
    assert not await store.wait_for_room(0.01)
    slow_disk.set()
    assert await store.wait_for_room(10)
    assert put(store, 3)
    await store.drain()
    assert store.count_leading([key_of(i) for i in (1, 2, 3)]) == 3


async def test_the_loop_runs_while_the_disk_does_not(make, slow_disk):
    store = await make(slots=4)
    put(store, 1)
    assert await read(store, 1) == "dram", "reads of DRAM do not queue behind the disk"
    slow_disk.set()


async def test_pins_of_one_block_share_its_promotion(make, slow_disk):
    slow_disk.set()
    store = await make(slots=1)
    await put_when_room(store, 1)
    await put_when_room(store, 2)
    await store.drain()
    slow_disk.clear()
    waiting = [asyncio.create_task(store.pinning.pin_each([key_of(1)], leading=True)) for _ in range(3)]
    await asyncio.sleep(0)
    assert store.contains(key_of(1)) == "ssd"
    assert store.reservations.reserve(key_of(1)) is None
    slow_disk.set()
    pins = [(await task)[0] for task in waiting]
    assert pins == [Pin(0, checksum(block_of(1)), "ssd", SLOT)] * 3
    with pytest.raises(NoSpace):
        store.reservations.reserve(key_of(3))
    for pin in pins:
        store.pinning.unpin([pin.slot])
    assert store.stats()["ssd"]["hits"] == 1


async def test_who_gives_up_waiting_keeps_no_pin(make, slow_disk):
    slow_disk.set()
    store = await make(slots=2)
    for i in (1, 2, 3):
        await put_when_room(store, i)
    await store.drain()
    slow_disk.clear()
    waiting = asyncio.create_task(store.pinning.pin_each([key_of(3), key_of(1)], leading=True))
    await asyncio.sleep(0)
    assert store.stats()["dram"]["held"] == 2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert store.stats()["dram"]["held"] == 1, "only the promotion itself"
    slow_disk.set()
    await store.drain()
    assert store.contains(key_of(1)) == "dram", "it was promoted all the same"


async def test_promotion_stops_where_dram_is_full_of_pins(make):
    store = await make(slots=2)
    for i in range(4):
        await put_when_room(store, i)
    await store.drain()
    pins = await store.pinning.pin_each(
        [key_of(i) for i in range(4)], leading=True
    )  # 2 and 3 are in DRAM, but the run begins with 0
    assert [pin.tier for pin in pins] == ["ssd", "ssd"]
    assert await store.pinning.pin_each([key_of(2)], leading=True) == []
    store.pinning.unpin([pin.slot for pin in pins])


async def test_the_run_ends_at_a_missing_block(make):
    store = await make(slots=4, map_bytes=0)
    put(store, 0)
    put(store, 2)
    pins = await store.pinning.pin_each([key_of(i) for i in range(3)], leading=True)
    assert len(pins) == 1
    store.pinning.unpin([pins[0].slot])


async def test_the_run_ends_at_a_damaged_block(make):
    store = await make(slots=4)
    for i in range(4):
        slot = store.reservations.reserve(key_of(i))
        store.arena.memory(slot)[:] = block_of(i)
        store.commit(key_of(i), slot, checksum(block_of(i)) ^ (i == 2))
        await store.drain()
    for i in range(10, 14):
        await put_when_room(store, i)
    await store.drain()
    pins = await store.pinning.pin_each([key_of(i) for i in range(4)], leading=True)
    assert [pin.tier for pin in pins] == ["ssd", "ssd"]
    store.pinning.unpin([pin.slot for pin in pins])


async def test_hits_of_a_run_are_kept_while_its_rest_is_promoted(make):
    store = await make(slots=4)
    for i in range(6):
        await put_when_room(store, i)
    await store.drain()
    pins = await store.pinning.pin_each([key_of(i) for i in (2, 0, 3, 1)], leading=True)  # in DRAM: 2, 3, 4, 5
    assert [pin.tier for pin in pins] == ["dram", "ssd", "dram", "ssd"]
    store.pinning.unpin([pin.slot for pin in pins])


async def test_damage_on_ssd_is_a_miss(make, monkeypatch):
    store = await make(slots=1)
    slot = store.reservations.reserve(key_of(1))
    store.arena.memory(slot)[:] = block_of(2)
    store.commit(key_of(1), slot, checksum(block_of(1)))  # these are not the bytes
    await store.drain()
    await put_when_room(store, 3)
    await store.drain()
    assert store.contains(key_of(1)) == "ssd"
    assert await read(store, 1) is None
    assert store.contains(key_of(1)) is None
    assert store.stats()["ssd"]["corrupt"] == 1


async def test_damage_in_dram_is_found_and_ssd_answers(make):
    store = await make()
    put(store, 1)
    await store.drain()
    assert await store.verify(key_of(1))
    (pin,) = await store.pinning.pin_each([key_of(1)], leading=True)
    store.arena.memory(pin.slot)[7] ^= 1
    assert not await store.verify(key_of(1))
    assert store.stats()["dram"]["corrupt"] == 1
    assert store.contains(key_of(1)) == "ssd"
    store.pinning.unpin([pin.slot])
    assert await read(store, 1) == "ssd"
    assert not await store.verify(key_of(99))


async def test_a_disk_that_stops_writing_leaves_a_dram_store(make, monkeypatch):
    store = await make(slots=2)
    monkeypatch.setattr(SsdTier, "put_many", lambda tier, rows: [False] * len(rows))
    for i in range(5):
        await put_when_room(store, i)
    assert await read(store, 4) == "dram"
    assert await read(store, 0) is None


async def test_hits_in_dram_keep_the_copy_on_ssd_young(make):
    store = await make(slots=3)
    await put_when_room(store, 0)
    for i in range(1, 2 * store.ssd.capacity):
        assert await read(store, 0) is not None
        await put_when_room(store, i)
        await store.drain()
    assert store.ssd.contains(key_of(0))


async def test_a_node_without_a_share():
    store = LocalStore(None, None)
    with pytest.raises(NoSpace):
        store.reservations.reserve(key_of(1))
    assert await store.pinning.pin_each([key_of(1)], leading=True) == []
    assert (store.contains(key_of(1)), store.count_leading([key_of(1)])) == (None, 0)
    assert not await store.wait_for_room(10)
    assert_idle(store)
    await store.close()


async def test_an_ssd_tier_needs_dram(tmp_path):
    ssd = SsdTier(tmp_path, SLOT, 1 << 20, ROOT)
    with pytest.raises(ValueError, match="--dram-bytes"):
        LocalStore(None, ssd)
    ssd.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), backend=st.sampled_from([None, *sorted(backends)]), slots=st.integers(1, 4))
def test_random_use_from_many_tasks_keeps_the_books(tmp_path_factory, seed, backend, slots):
    """Readers, writers, and tasks cancelled at random: never wrong bytes, nothing leaks."""
    asyncio.run(random_use(tmp_path_factory.mktemp("tiers"), seed, backend, slots))


async def random_use(directory, seed, backend, slots):
    rng = random.Random(seed)
    region = Region.private("dram", slots * SLOT)
    ssd = SsdTier(directory, SLOT, 256 << 10, ROOT, backend=backend) if backend else None
    store = LocalStore(Arena(region, SLOT), ssd)

    async def one(i):
        if rng.random() < 0.5:
            await read(store, i)
        else:
            try:
                put(store, i)
            except NoSpace:
                await store.wait_for_room(1)

    async def some():
        for _ in range(20):
            await one(rng.randrange(12))
            await asyncio.sleep(0)
            store.check_integrity()

    tasks = [asyncio.create_task(some()) for _ in range(4)]
    await asyncio.sleep(0.001 * rng.random())
    rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
    await store.drain()
    assert_idle(store)
    await store.close()
    region.close()


# --- removals


async def test_what_is_removed_before_its_write_to_ssd_does_not_come_back_from_there(make, slow_disk):
    store = await make(slots=4)
    put(store, 1)  # its write is under way
    await asyncio.sleep(0)
    put(store, 2)  # waits for the next one
    removing = asyncio.create_task(store.remove([key_of(1), key_of(2)]))
    await asyncio.sleep(0)
    assert [store.contains(key_of(i)) for i in (1, 2)] == [None, None]
    slow_disk.set()
    assert await removing == 2
    await store.drain()
    assert [store.contains(key_of(i)) for i in (1, 2)] == [None, None]
    await store.close()
    again = await make(slots=4)
    assert [again.contains(key_of(i)) for i in (1, 2)] == [None, None], "nor after a restart"


async def test_a_block_that_is_removed_while_it_is_promoted_does_not_stay(make, slow_disk):
    slow_disk.set()
    store = await make(slots=2)
    for i in (1, 2, 3):
        await put_when_room(store, i)
    await store.drain()
    slow_disk.clear()
    reading = asyncio.create_task(store.pinning.pin_each([key_of(1)], leading=True))
    await asyncio.sleep(0)
    removing = asyncio.create_task(store.remove([key_of(1)]))
    await asyncio.sleep(0)
    assert store.contains(key_of(1)) is None
    assert await store.pinning.pin_each([key_of(1)], leading=True) == [], "nobody begins to read it any more"
    slow_disk.set()
    assert await removing == 1
    assert await reading == []
    assert store.contains(key_of(1)) is None


async def test_clear_leaves_kept_blocks_and_those_of_programs(make, monkeypatch):
    monkeypatch.setattr("cache.tiers.local_store.CLEAR_BATCH", 2)
    store = await make(slots=4)
    for i in range(1, 9):  # more than DRAM has
        await put_when_room(store, i)
    await store.drain()
    assert store.keep([key_of(8)]) == [True]
    slot = store.reservations.reserve(key_of(20), OBJECTS)
    store.arena.memory(slot)[:] = block_of(20)
    store.commit(key_of(20), slot, checksum(block_of(20)))
    await store.drain()
    assert store.contains(key_of(1)) == "ssd"
    assert await store.clear() == 7
    assert sorted(store.keys()) == [key_of(8), key_of(20)]
    assert await store.clear() == 0
    assert store.give_up([key_of(8)]) == 1
    await store.close()
    again = await make(slots=4)
    assert sorted(again.keys()) == [key_of(8), key_of(20)], "after a restart too"


async def test_what_is_put_after_a_removal_began_stays(make, slow_disk):
    store = await make(slots=4)
    put(store, 1)
    await asyncio.sleep(0)
    removing = asyncio.create_task(store.remove([key_of(1)]))
    await asyncio.sleep(0)
    assert put(store, 1)
    slow_disk.set()
    assert await removing == 1
    await store.drain()
    assert store.contains(key_of(1)) == "dram"
    assert store.ssd.contains(key_of(1))
    await store.close()
    assert await read(await make(slots=4), 1) == "ssd"
