"""The pooled store over nodes whose shares have an SSD tier."""

import errno
import os

import pytest

from cache.arena import UNCHECKED, checksum
from cache.homes.rendezvous import equal_members, homes
from cache.ssd import backends, tier
from cache.store import keeper
from tests.cache.pooled import SLOT, block_of, cluster_of, get, key_of, lookup, put, until


@pytest.mark.parametrize("backend", sorted(backends))
async def test_more_blocks_than_dram_come_through_it_from_ssd(tmp_path, backend):
    async with cluster_of("client", slots=0) as cluster:
        client, b = cluster.stores["client"], await cluster.add("b", slots=4, directory=tmp_path, backend=backend)
        assert await put(client, range(40)) == 40
        result = await get(client, range(40))
        assert result.blocks == 40
        assert result.tiers["ssd"] >= 36
        assert await lookup(client, range(41)) == 40
        await b.local.drain()


@pytest.mark.parametrize("backend", sorted(backends))
async def test_acknowledged_is_readable(tmp_path, backend):
    """Upstream lost more than half of 400 values here (reference/transfer.md, section 8); the SSD tier has room."""
    async with cluster_of("client", slots=0) as cluster:
        client = cluster.stores["client"]
        for node in "abc":
            await cluster.add(node, slots=8, directory=tmp_path / node, backend=backend)
        stored = [i for i in range(400) if await put(client, [i])]
        assert len(stored) == 400
        assert [i for i in stored if (await get(client, [i])).blocks == 0] == []


@pytest.mark.parametrize("backend", sorted(backends))
async def test_a_restarted_node_finds_its_blocks_again(tmp_path, backend):
    async with cluster_of() as cluster:
        client = await cluster.add("client", slots=0)
        b = await cluster.add("b", directory=tmp_path, backend=backend)
        await put(client, range(20))
        await b.close()
        cluster.members.clear()
        await cluster.add("b", directory=tmp_path, backend=backend)
        result = await get(client, range(20))
        assert (result.blocks, result.tiers) == (20, {"ssd": 20})


@pytest.mark.parametrize("way", [{}, {"message_call_bytes": 1 << 20}], ids=["transfers", "messages"])
@pytest.mark.parametrize("backend", sorted(backends))
async def test_without_checksums_only_reads_from_ssd_are_compared(tmp_path, way, backend):
    async with cluster_of("client", slots=0, checksums=False, **way) as cluster:
        client = cluster.stores["client"]
        b = await cluster.add("b", slots=4, directory=tmp_path, backend=backend)
        assert await put(client, range(4)) == 4
        await b.local.drain()
        assert (await get(client, range(4))).blocks == 4
        (pin,) = await b.local.pinning.pin_each([key_of(2)], leading=True)
        assert pin.checksum == UNCHECKED
        b.local.arena.memory(pin.slot)[5] ^= 1
        b.local.pinning.unpin([pin.slot])
        await client.get_into([key_of(2)], "kv", [0])
        assert client.kv.memory[:SLOT] != block_of(2), "nobody looked"
        assert await b.local.verify(key_of(2)), "and nobody can tell"
        for i in range(4, 12):
            assert await put(client, [i]) == 1
        await b.local.drain()
        result = await get(client, [2])
        assert result.tiers == {"ssd": 1}, "the copy on SSD is as it was put, and has a checksum"


def broken(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def out_of_dram(store, *keys):
    """Other values drive these out of the node's DRAM."""
    i = 10**6
    while any(store.local.contains(key) == "dram" for key in keys):
        await store.put(key_of(i), b"other")
        await store.local.drain()
        i += 1


async def unreadable(store, key):
    """Its disk fails to read until this value, which only the disk has, counts as missing."""
    while store.local.contains(key) is not None:
        assert await store.get(key) is None


@pytest.mark.parametrize("backend,way,pin", [("file", "message", True), ("lmdb", "lent slot", False)])
async def test_what_is_put_while_the_disk_cannot_be_read_is_what_is_read_later(
    tmp_path, monkeypatch, backend, way, pin
):
    """Unread, the old value was still on SSD, so the new one was not written, and the old one came back."""
    monkeypatch.setattr(tier, "TEND_S", 0.05)
    async with cluster_of() as cluster:
        a = await cluster.add("a", slots=4, directory=tmp_path, backend=backend)
        key, old, new = key_of(1), block_of(1)[:500], block_of(2)
        assert await a.put(key, old, durable=True, pin=pin)
        await out_of_dram(a, key)
        with monkeypatch.context() as patch:
            patch.setattr(a.local.ssd._medium, "read", broken)
            await unreadable(a, key)
            if way == "message":
                assert await a.put(key, new, durable=True)
            else:
                slot = a.local.reservations.lend()
                a.local.arena.memory(slot)[:] = new
                assert a.local.enter_lent(key, slot, checksum(new), SLOT)
                a.local.reservations.take_back(slot)
        assert not await a.put(key, old, durable=True)
        assert a.local.is_kept(key) == pin
        await until(lambda: a.local.ssd.readable)
        await out_of_dram(a, key)
        assert await a.get(key) == new
        await a.close()
        cluster.members.clear()
        del cluster.stores["a"]
        a = await cluster.add("a", slots=4, directory=tmp_path, backend=backend)
        assert await a.get(key) == new
        assert a.local.is_kept(key) == pin


@pytest.mark.parametrize("offered", ["the value that stays", "the other one"])
async def test_a_copy_meets_another_value_on_a_disk_that_cannot_be_read(tmp_path, monkeypatch, offered):
    """A node that kept it in place of home `b` hands it back; `c` is the other home, and has the value of `b`."""
    monkeypatch.setattr(tier, "TEND_S", 0.05)
    monkeypatch.setattr(keeper, "RETRY_S", 0.05)
    async with cluster_of("a", "c", replicas=2) as cluster:
        a, c = (cluster.stores[name] for name in "ac")
        b = await cluster.add("b", slots=4, directory=tmp_path, replicas=2)
        key = next(key_of(i) for i in range(100) if set(homes(key_of(i), equal_members("abc"), 2)) == {"b", "c"})
        least, other = sorted((block_of(1), block_of(2)), key=checksum)
        ours, theirs = (other, least) if offered == "the value that stays" else (least, other)
        assert await c.put(key, ours)
        await out_of_dram(b, key)
        with monkeypatch.context() as patch:
            patch.setattr(b.local.ssd._medium, "read", broken)
            while b.local.contains(key) is not None:
                await b.local.pinning.pin_each([key])
            slot = a.local.reservations.reserve(key)
            a.local.arena.memory(slot)[:] = theirs
            a.local.commit(key, slot, checksum(theirs))
            a._share.hints.add(key, "b")
            for store in (a, b, c):
                store.keeper._before = equal_members("abc")
                store.keeper.start()
            await until(lambda: a.keeper.stats()["offered"] > 0)
        for store in (b, c):
            await until(lambda store=store: store.local.content(key) == (checksum(least), SLOT))
            assert await store.get(key) == least
        await until(lambda: b.local.ssd.readable)
        await out_of_dram(b, key)
        assert b.local.content(key) == (checksum(least), SLOT)
