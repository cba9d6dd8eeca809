"""Blocks whose memory callers copy themselves, and keys that are found by their first bytes."""

from ctypes import string_at

from cache import messages
from cache.store.scattered import PRESENT, STORED, UNPINNED, Scatter
from connect.common.raw_memory import Pieces
from tests.cache.pooled import SLOT, cluster_of


def scatter(key: bytes, *parts: bytes) -> Scatter:
    value = Pieces.of(*parts)
    return Scatter(key, value.nbytes, lambda address: value.copy_to(address, 0, value.nbytes))


def key(prefix: bytes, number: int) -> bytes:
    return prefix + number.to_bytes(16 - len(prefix), "big")


async def test_blocks_of_many_pieces_come_back():
    async with cluster_of("a", "b", "c") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        blocks = [scatter(key(b"k", i), b"%d," % i, bytes(i * 100), b"end") for i in range(20)]
        assert await a.scattered.put_each(blocks) == [STORED] * 20
        assert await b.scattered.put_each([*blocks[:3], scatter(key(b"k", 99), b"x")]) == [PRESENT] * 3 + [STORED]
        found = {}
        keys = [key(b"k", i) for i in (3, 50, 19)]
        await b.scattered.get_each(keys, lambda i, address, nbytes: found.update({i: string_at(address, nbytes)}))
        assert found == {0: b"3," + bytes(300) + b"end", 2: b"19," + bytes(1900) + b"end"}


async def test_each_block_has_its_own_end():
    """A home pins a limited number of blocks; the others are stored without a pin."""
    async with cluster_of("a", slots=8) as cluster:
        a = cluster.stores["a"]
        blocks = [scatter(key(b"k", i), bytes([i]) * SLOT) for i in range(8)]
        ends = await a.scattered.put_each(blocks, pin=True)
        assert set(ends) == {STORED, UNPINNED}
        assert ends.count(STORED) == 2, "a quarter of the slots may be pinned"
        assert await a.unpin_many([block.key for block in blocks]) == 2


async def test_keys_are_listed_by_their_first_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "OUTSETS_MAX", 4)
    monkeypatch.setattr("cache.server.listing.LISTED_MAX", 3)
    async with cluster_of() as cluster:
        a, b = [await cluster.add(name, slots=16, directory=tmp_path / name) for name in ("a", "b")]
        mine = [key(b"mine", i) for i in range(20)]
        await a.scattered.put_each([scatter(one, b"head of " + one, bytes(2000)) for one in mine])
        await a.scattered.put_each([scatter(key(b"else", i), bytes(SLOT)) for i in range(30)])
        await a.flush()
        assert await b.keys_of_homes(b"mine") == sorted(mine)
        assert await b.keys_of_homes(b"none") == []
        outsets = await b.outsets([*mine, key(b"mine", 99)], 24)
        assert outsets == {one: b"head of " + one for one in mine}, "also of blocks that only the SSD has"
        assert await b.outsets([key(b"else", 1)], 4000) == {key(b"else", 1): bytes(SLOT)}


async def test_a_home_that_does_not_answer_lists_nothing():
    async with cluster_of("a", "b") as cluster:
        a = cluster.stores["a"]
        keys = [key(b"k", i) for i in range(20)]
        await a.scattered.put_each([scatter(one, b"x") for one in keys])
        cluster.hub.kill("b")
        here = await a.keys_of_homes(b"k")
        assert 0 < len(here) < 20
        assert await a.outsets(keys, 5) == dict.fromkeys(here, b"x")
