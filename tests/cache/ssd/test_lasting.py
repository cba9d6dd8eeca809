"""What outlives a moment: facts and pins of blocks over SSD, moves and restarts; durable puts; objects too large."""

import asyncio
import errno
import os
import random
import threading
from contextlib import asynccontextmanager
from itertools import count

import pytest

from cache.arena import Arena, checksum
from cache.homes.rendezvous import equal_members, homes
from cache.pool.policies import choose
from cache.pool.policy import OBJECTS, PLAIN, Facts
from cache.results import NoRoom, NotDurable, Unreachable
from cache.ssd import New, SsdError, SsdTier, backends, note, tier
from cache.store.objects import Manifest, Objects, chunk_keys, digest, manifest_key
from cache.tiers.local_store import LocalStore, NoSpace
from net.transfer.common.memory import Region
from tests.cache.pooled import SLOT, block_of, cluster_of, get, key_of, of_home, until
from tests.cache.pooled import put as put_blocks

ROOT = b"r" * 16
CHAT = Facts(3, 0.25, "interactive")
JOB = Facts(7, 0.5, "batch")


@pytest.fixture(params=sorted(backends))
def backend(request):
    return request.param


@asynccontextmanager
async def local(directory, backend, slots=8, shares=None, policy="lru", map_bytes=1 << 20, **options):
    region = Region.shared("dram", slots * SLOT)
    ssd = None
    if directory is not None:
        ssd = SsdTier(directory, SLOT, map_bytes, ROOT, choose(policy, shares), backend=backend)
    store = LocalStore(Arena(region, SLOT), ssd, choose(policy, shares), **options)
    try:
        yield store
    finally:
        await store.close()
        store.check_integrity()
        assert store.stats()["dram"]["held"] == 0
        region.close()


def put(store, i, facts=PLAIN):
    slot = store.reservations.reserve(key_of(i), facts)
    assert slot is not None
    store.arena.memory(slot)[:] = block_of(i)
    store.commit(key_of(i), slot, checksum(block_of(i)))


async def put_when_room(store, i, facts=PLAIN):
    while True:
        try:
            return put(store, i, facts)
        except NoSpace:
            assert await store.wait_for_room(20, facts)


async def read(store, i):
    pins = await store.pinning.pin_each([key_of(i)], leading=True)
    for pin in pins:
        assert bytes(store.arena.memory(pin.slot)) == block_of(i)
        store.pinning.unpin([pin.slot])
    return pins[0].tier if pins else None


def in_dram(store, numbers):
    return [i for i in numbers if store.contains(key_of(i)) == "dram"]


# --- facts


async def test_facts_go_to_ssd_over_a_restart_and_back(tmp_path, backend):
    async with local(tmp_path, backend, slots=2) as store:
        for i, facts in ((1, CHAT), (2, JOB), (3, PLAIN), (4, OBJECTS)):
            await put_when_room(store, i, facts)
        await store.drain()
        assert await read(store, 1) == "ssd"
        assert store.facts(key_of(1)) == CHAT
    async with local(tmp_path, backend, slots=2) as store:
        assert [store.facts(key_of(i)) for i in (1, 2, 3, 4)] == [CHAT, JOB, PLAIN, OBJECTS]
        assert await read(store, 2) == "ssd"
        assert store.facts(key_of(2)) == JOB


async def test_files_of_versions_without_facts_are_read(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(note, "pack", lambda facts, kept: b"" if backend == "lmdb" else bytes(20))
    async with local(tmp_path, backend) as store:
        for i in range(5):
            await put_when_room(store, i, CHAT)
    monkeypatch.undo()
    async with local(tmp_path, backend) as store:
        assert [await read(store, i) for i in range(5)] == ["ssd"] * 5
        assert store.facts(key_of(0)) == PLAIN


async def test_a_class_keeps_its_share_through_promotions(tmp_path, backend):
    """Protected blocks that had been to SSD and back were of no class, and a flood took them."""
    shares = {"interactive": 0.5, "batch": 0.25}
    async with local(tmp_path, backend, slots=16, shares=shares, map_bytes=4 << 20) as store:
        for i in range(8):
            await put_when_room(store, i, CHAT)
        for i in range(100, 130):  # drives some of them out while there is room to borrow
            await put_when_room(store, i, JOB)
        await store.drain()
        for i in range(8):
            assert await read(store, i) is not None
        assert in_dram(store, range(8)) == list(range(8))
        for i in range(200, 260):
            await put_when_room(store, i, JOB)
        for i in range(100, 130):
            await read(store, i)
        assert in_dram(store, range(8)) == list(range(8))


async def test_a_flood_that_waits_for_the_disk_takes_nothing_from_another_class(tmp_path, backend, monkeypatch):
    """All blocks of the flood are held for their write, so only those of others could go."""
    async with local(tmp_path, backend, slots=8, shares={"interactive": 0.5, "batch": 0.25}) as store:
        for i in range(4):
            put(store, i, CHAT)
        await store.drain()
        go = asyncio.Event()
        write = store._behind._write

        async def slow(rows):
            await go.wait()
            return await write(rows)

        monkeypatch.setattr(store._behind, "_write", slow)
        for i in range(100, 104):
            put(store, i, JOB)
        with pytest.raises(NoSpace, match="--cache-shares"):
            put(store, 104, JOB)
        assert in_dram(store, range(4)) == [0, 1, 2, 3]
        go.set()
        assert await store.wait_for_room(20, JOB)
        put(store, 104, JOB)
        assert in_dram(store, range(4)) == [0, 1, 2, 3]


async def test_policies_see_position_and_cost_behind_a_promotion(tmp_path, backend):
    for policy, first in (("length-aware", Facts(position=9)), ("cost-aware", Facts(cost_s=0.01))):
        async with local(tmp_path / policy, backend, slots=2, policy=policy) as store:
            await put_when_room(store, 1, first)
            await put_when_room(store, 2, Facts(position=0, cost_s=5.0))
            await put_when_room(store, 3, Facts(position=0, cost_s=50.0))
            await store.drain()
            assert in_dram(store, (1, 2, 3)) == [2, 3], "it went first"
            await read(store, 1)
            stayed = in_dram(store, (2, 3))
            await read(store, next(i for i in (2, 3) if i not in stayed))
            assert in_dram(store, (1, 2, 3)) == [2, 3], "and goes first again"


async def test_facts_and_pins_travel_with_repairs(tmp_path):
    async with cluster_of("a") as cluster:
        a = cluster.stores["a"]
        await put_blocks(a, range(20))
        keys = [key_of(i) for i in range(20)]
        await a.remove_many(keys)
        for i in range(20):
            put(a.local, i, CHAT)
        a.local.keep(keys[:10])
        b = await cluster.add("b")
        theirs = of_home(cluster, "b", 20)
        moved = [i for i in theirs if i < 20]
        assert moved
        a.keeper.start()
        await until(lambda: all(b.local.contains(key_of(i)) for i in moved))
        assert all(b.local.facts(key_of(i)) == CHAT for i in moved)
        assert [b.local.is_kept(key_of(i)) for i in moved] == [i < 10 for i in moved]
        await a.keeper.close()
        for store in (a, b):
            store.local.give_up(keys)


async def test_values_of_programs_are_of_the_class_objects(tmp_path):
    async with cluster_of("a", message_call_bytes=1 << 20) as cluster:
        a = cluster.stores["a"]
        await a.put(key_of(1), b"value")
        await put_blocks(a, [2])
        await Objects(a).put("objects/x", bytes(9000))
        assert {a.local.facts(key) for key in list(a.local.keys())} == {OBJECTS}
        assert await a.local.clear() == 0, "KV only"


# --- pins


async def test_what_is_pinned_stays(tmp_path, backend):
    """With and without an SSD tier, and over a restart."""
    for directory in (None, tmp_path / "ssd"):
        async with local(directory, backend, slots=8, pin_share=0.25, map_bytes=256 << 10) as store:
            most = store.stats()["dram"]["pinned_most"]
            for i in range(most):
                await put_when_room(store, i)
            assert store.keep([key_of(i) for i in range(most)]) == [True] * most
            assert store.keep([key_of(10**6)]) == [None]
            for i in range(1000, 1200):
                await put_when_room(store, i)
            assert store.keep([key_of(1199)]) == [False]
            await store.drain()
            assert all([await read(store, i) for i in range(most)])
    async with local(tmp_path / "ssd", backend, slots=8, pin_share=0.25, map_bytes=256 << 10) as store:
        for i in range(2000, 2200):
            await put_when_room(store, i)
        await store.drain()
        assert all([await read(store, i) for i in range(most)])
        assert store.give_up([key_of(i) for i in range(most)]) == most
        for i in range(3000, 3200):
            await put_when_room(store, i)
        await store.drain()
        assert not any([await read(store, i) for i in range(most)])
        assert store.keep([key_of(3199)]) == [True]
        assert await store.remove([key_of(3199)]) == 1
        assert store.stats()["dram"]["pinned"] == 0


@pytest.mark.parametrize("way", [{}, {"message_call_bytes": 1 << 20}], ids=["transfers", "messages"])
async def test_a_pinned_object_outlives_a_flood_and_the_limit_is_a_clear_error(way):
    async with cluster_of("a", slots=16, **way) as cluster:
        a = cluster.stores["a"]
        data = random.Random(1).randbytes(2 * SLOT)
        assert await Objects(a).put("objects/x", data, pin=True)
        assert not await Objects(a).put("objects/x", data, pin=True)
        for i in range(200):
            await a.put(key_of(i), b"value")
        assert await Objects(a).get("objects/x") == data
        with pytest.raises(NoRoom, match="--pin-share"):
            await Objects(a).put("objects/y", data[::-1], pin=True)
        assert await Objects(a).get("objects/y") is None
        assert a.local.stats()["dram"]["pinned"] == 3
        with pytest.raises(NoRoom, match="--pin-share"):
            await a.put_many([(key_of(500 + i), b"v") for i in range(3)], pin=True)
        assert await Objects(a).unpin("objects/x")
        assert not await Objects(a).unpin("objects/x")
        await a.unpin_many([key_of(500 + i) for i in range(3)])
        for i in range(200, 400):
            await a.put(key_of(i), b"value")
        assert await Objects(a).get("objects/x") is None


# --- durable puts


@pytest.mark.parametrize("way", [{}, {"message_call_bytes": 1 << 20}], ids=["transfers", "messages"])
async def test_a_durable_put_is_synced_before_it_is_acknowledged(tmp_path, backend, way):
    async with cluster_of("client", slots=0, **way) as cluster:
        client, b = cluster.stores["client"], await cluster.add("b", directory=tmp_path, backend=backend)
        ssd, synced = b.local.ssd, []
        sync = ssd._medium.sync
        ssd._medium.sync = lambda: (synced.append(set(ssd._index.entries)), sync())
        assert await client.put(key_of(1), b"value", durable=True)
        assert key_of(1) in synced[-1]
        assert await Objects(client).put("objects/x", bytes(5 * SLOT), durable=True)
        manifest = await Objects(client).info("objects/x")
        assert {manifest_key("objects/x"), *chunk_keys("objects/x", manifest, 0, 5)} <= synced[-1]
        so_far = len(synced)
        await asyncio.gather(*(client.put(key_of(i), b"value", durable=True) for i in range(100, 150)))
        assert len(synced) - so_far < 50, "they share syncs"
        assert await client.put(key_of(1), b"value", durable=True) is False


async def test_a_durable_put_without_an_ssd_tier_says_so():
    async with cluster_of("a") as cluster:
        with pytest.raises(NotDurable, match="--ssd-path"):
            await cluster.stores["a"].put(key_of(1), b"value", durable=True)


def broken(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_disk_that_fails_is_said_and_what_it_did_not_take_is_written_when_it_is_back(
    tmp_path, backend, monkeypatch
):
    async with cluster_of() as cluster:
        a = await cluster.add("a", directory=tmp_path, backend=backend)
        medium = a.local.ssd._medium
        with monkeypatch.context() as patch:
            patch.setattr(medium, "write", broken)
            with pytest.raises(NotDurable, match="Input/output error"):
                await a.put(key_of(1), b"value", durable=True)
            await a.put(key_of(2), b"value")
            with pytest.raises(NotDurable, match="Input/output error"):
                await a.flush()
            stats = a.local.stats()
            assert stats["ssd"]["failing"] == 1
            assert "Input/output error" in stats["ssd"]["trouble"]
            assert stats["dram"]["unwritten"] == 2
            assert await a.get(key_of(1)) == b"value"
        await until(lambda: a.local.ssd.contains(key_of(1)) and a.local.ssd.contains(key_of(2)))
        await a.flush()
        assert a.local.stats()["ssd"]["trouble"] == ""


async def test_what_was_written_before_a_sync_that_failed_is_not_called_durable(tmp_path, backend, monkeypatch):
    """The kernel may have dropped it, and says so only once: it is written again."""
    async with local(tmp_path, backend) as store:
        put(store, 1)
        await store.drain()
        with monkeypatch.context() as patch:
            patch.setattr(store.ssd._medium, "sync", broken)
            assert await store.make_durable([key_of(1)], 20) == [False]
            with pytest.raises(SsdError, match="--ssd-path"):
                await store.flush(20)
        assert not store.ssd.is_durable(key_of(1))
        writes = store.stats()["ssd"]["writes"]
        assert await store.make_durable([key_of(1)], 20) == [True]
        assert store.stats()["ssd"]["writes"] == writes + 1


@pytest.mark.parametrize("tier_now", ["dram", "ssd"])
async def test_what_was_written_before_a_sync_in_the_background_that_failed_is_written_again(
    tmp_path, backend, monkeypatch, tier_now
):
    """`flush` considered only what the disk had not taken, and no durable put of the value succeeded once it had left
    DRAM."""
    monkeypatch.setattr(tier, "TEND_S", 0.01)
    async with cluster_of() as cluster:
        a = await cluster.add("a", slots=8, directory=tmp_path, backend=backend)
        ssd, numbers, others = a.local.ssd, range(1, 4), count(100)

        async def doubtful():
            with monkeypatch.context() as patch:
                patch.setattr(ssd._medium, "sync", broken)
                await a.put_many([(key_of(i), b"value %d" % i) for i in numbers])
                await a.local.drain()
                assert not ssd.sync()
            if tier_now == "ssd":
                for _ in range(10):
                    await a.put(key_of(next(others)), b"other")
                    await a.local.drain()
            assert [a.local.contains(key_of(i)) for i in numbers] == [tier_now] * 3
            await until(lambda: not ssd.health.trouble)
            assert not any(ssd.is_durable(key_of(i)) for i in numbers)

        await doubtful()
        await a.flush()
        assert all(ssd.is_durable(key_of(i)) for i in numbers)
        assert await a.get_many([key_of(i) for i in numbers]) == [b"value %d" % i for i in numbers]
        await a.remove_many([key_of(i) for i in numbers])
        await doubtful()
        assert not await a.put(key_of(2), b"value 2", durable=True)
        if tier_now == "ssd":
            with monkeypatch.context() as patch:
                patch.setattr(ssd._medium, "read", broken)
                with pytest.raises(NotDurable, match="2 blocks are not safe"):
                    await a.flush()
            await until(lambda: ssd.readable)
        await a.flush()
        assert ssd.doubtful_keys() == []


async def test_a_block_that_the_kernel_dropped_after_a_failed_sync_is_said(tmp_path, backend, monkeypatch):
    async with local(tmp_path, backend, slots=4) as store:
        await put_when_room(store, 1)
        await store.drain()
        with monkeypatch.context() as patch:
            patch.setattr(store.ssd._medium, "sync", broken)
            assert not store.ssd.sync()
        for i in range(100, 105):
            await put_when_room(store, i)
            await store.drain()
        real = store.ssd._medium.read

        def old(entry, into):
            real(entry, into)
            into[0] ^= 1

        monkeypatch.setattr(store.ssd._medium, "read", old)
        with pytest.raises(SsdError, match="1 blocks are not safe on SSD"):
            await store.flush()


# --- room


async def test_an_object_that_cannot_fit_is_no_room_and_nothing_is_lost(tmp_path):
    for directory in (None, tmp_path):
        async with cluster_of() as cluster:
            a = await cluster.add("a", slots=16, directory=directory)
            room = (a.local.ssd.capacity if directory else 16) - 3
            small = random.Random(2).randbytes(2 * SLOT)
            await Objects(a).put("objects/small", small)
            with pytest.raises(NoRoom, match=r"has room for \d+: raise --ssd-bytes"):
                await Objects(a).put("objects/large", bytes((room + 10) * SLOT))
            with pytest.raises(NoRoom, match="has room"):
                await Objects(a).put("objects/small", bytes((room + 10) * SLOT), replace=True)
            assert await Objects(a).get("objects/small") == small
            assert not await Objects(a).exists("objects/large")
            large = random.Random(3).randbytes((room - 3) * SLOT - 7)
            assert await Objects(a).put("objects/large", large)
            assert await Objects(a).get("objects/large") == large, "larger than memory, where there is an SSD tier"


async def test_an_object_whose_parts_drive_each_other_out_is_not_acknowledged(monkeypatch):
    """Others put meanwhile: the room that there was is not there any more."""
    async with cluster_of("a", slots=8) as cluster:
        a = cluster.stores["a"]
        put_many, rounds = a.put_many, []

        async def put_and_be_overtaken(items, **options):
            done = await put_many(items, **options)
            rounds.append(1)
            for i in range(8):
                await put_many([(key_of(1000 * len(rounds) + i), b"other")])
            return done

        monkeypatch.setattr(a, "put_many", put_and_be_overtaken)
        with pytest.raises(NoRoom, match="driven out"):
            await Objects(a).put("objects/x", bytes(4 * SLOT))
        assert await Objects(a).get("objects/x") is None


@pytest.mark.parametrize("pin", [False, True])
async def test_a_replacement_that_fails_at_the_name_leaves_the_old_object(tmp_path, monkeypatch, pin):
    """The disk of the name's home fails; that of the content does not."""
    async with cluster_of() as cluster:
        for home in "ab":
            await cluster.add(home, directory=tmp_path / home)
        a, b = (cluster.stores[home] for home in "ab")
        old, new = b"old", b"new"

        def home(key):
            return homes(key, equal_members("ab"))[0]

        def parts(name, data):
            manifest = Manifest(len(data), SLOT, digest(memoryview(data)))
            return chunk_keys(name, manifest, 0, 1)

        names = (f"objects/{i}" for i in range(1000))
        name = next(n for n in names if home(manifest_key(n)) == "b" and home(*parts(n, new)) == "a")
        await Objects(a).put(name, old, pin=pin)
        with monkeypatch.context() as patch:
            patch.setattr(b.local.ssd._medium, "write", broken)
            with pytest.raises(NotDurable, match="Input/output error"):
                await Objects(a).put(name, new, replace=True, durable=True)
        assert await Objects(a).get(name) == old
        assert b.local.is_kept(manifest_key(name)) == pin
        assert not any(store.local.contains(*parts(name, new)) for store in (a, b))
        assert await Objects(a).put(name, new, replace=True, durable=True)
        assert await Objects(a).get(name) == new
        assert not any(store.local.contains(*parts(name, old)) for store in (a, b))


@pytest.mark.parametrize("stored", [False, True])
async def test_a_replacement_whose_home_does_not_answer_leaves_the_old_object(monkeypatch, stored):
    """The client skips that home for a while, and the home may have stored the new manifest all the same."""
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home")
        old, new, name = block_of(1) * 2, block_of(2) * 2, "objects/x"
        await Objects(client).put(name, old)
        put = client.put

        async def unanswered(key, value, **options):
            monkeypatch.setattr(client, "put", put)
            if stored:
                assert await put(key, value, **options)
            client._calls._shun("home")
            raise Unreachable("no answer")

        monkeypatch.setattr(client, "put", unanswered)
        with pytest.raises(Unreachable):
            await Objects(client).put(name, new, replace=True)
        assert await Objects(client).get(name) == old
        assert len(home.local.keys()) == 3


async def test_a_removal_does_not_wait_for_a_disk_that_hangs(tmp_path, backend, monkeypatch):
    """The client took its home for lost, skipped it, and lost an object that it wanted to replace."""
    async with cluster_of("client", slots=0) as cluster:
        client, home = cluster.stores["client"], await cluster.add("home", directory=tmp_path, backend=backend)
        old, new, name = block_of(1) * 2, block_of(2) * 2, "objects/x"
        await client.put_many([(key_of(i), b"value") for i in range(3)])
        await Objects(client).put(name, old)
        await client.flush()
        disk, medium = threading.Event(), home.local.ssd._medium
        for what, work in (("write", medium.write), ("erase", medium.erase)):

            def hang(*rows, work=work):
                disk.wait(60)
                return work(*rows)

            monkeypatch.setattr(medium, what, hang)
        try:
            assert await client.remove_many([key_of(0), key_of(1)]) == 2
            assert await client.put(key_of(1), b"again")
            assert await client.get_many([key_of(i) for i in range(3)]) == [None, b"again", b"value"]
            assert await Objects(client).put(name, new, replace=True)
            assert await Objects(client).get(name) == new
            assert client.stats()["home_failures"] == 0
        finally:
            disk.set()
        await client.flush()
        await home.close()
        cluster.members.clear()
        await cluster.add("home", directory=tmp_path, backend=backend)
        assert await client.get_many([key_of(i) for i in range(3)]) == [None, b"again", b"value"]
        assert await Objects(client).get(name) == new


# --- renewals


def test_a_renewal_that_fails_is_tried_again(tmp_path, backend, monkeypatch, caplog):
    monkeypatch.setattr(tier, "TEND_S", 0.01)
    monkeypatch.setattr(tier, "RENEW_AGAIN_S", 0.02)
    one = SsdTier(tmp_path, SLOT, 1 << 20, ROOT, backend=backend)
    try:
        assert one.put(key_of(1), block_of(1), checksum(block_of(1)))
        fallocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", broken)
        with one._writing:
            one._renew(tier.Damaged("a test says so"))
        assert one.stats()["closed"] == 1
        assert "--ssd-bytes" in one.stats()["trouble"]
        assert one.put_many([New(key_of(2), block_of(2), checksum(block_of(2)))]) == [False]
        assert not one.sync()
        assert not one.contains(key_of(1))
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        while one.stats()["closed"]:
            one._stop.wait(0.01)
        assert one.stats()["trouble"] == ""
        assert one.put(key_of(2), block_of(2), checksum(block_of(2)))
        into = bytearray(SLOT)
        assert one.get(key_of(2), into) and into == block_of(2)
        assert one.sync()
        assert "reopened" in caplog.text
    finally:
        one.close()


def test_many_damaged_blocks_are_few_lines(tmp_path, backend, caplog):
    one = SsdTier(tmp_path, SLOT, 1 << 20, ROOT, backend=backend)
    try:
        for i in range(64):
            assert one.put(key_of(i), block_of(i), checksum(block_of(i)) ^ 1)
        assert all(one.get(key_of(i), bytearray(SLOT)) is None for i in range(64))
        assert one.stats()["corrupt"] == 64
        assert caplog.text.count("dropped damaged block") == 7, "the 1st, 2nd, 4th, ... 64th"
        assert "(64 so far)" in caplog.text
    finally:
        one.close()


async def test_many_damaged_blocks_that_arrive_are_few_lines_too(caplog):
    async with cluster_of("client", slots=0) as cluster:
        client, b = cluster.stores["client"], await cluster.add("b")
        for i in range(40):
            await put_blocks(client, [i])
            slot = b.local._pool.lookup(key_of(i))
            b.local.arena.memory(slot)[9] ^= 1
            assert (await get(client, [i])).blocks == 0
        assert client.stats()["corrupt"] == 40
        assert caplog.text.count("did not match") == 6
