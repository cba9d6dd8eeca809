"""Named bytes of any size, on the in-memory network of fakes.py."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store.objects import Exists, Manifest, Objects, chunk_keys, manifest_key
from tests.cache.store.test_store import SLOT, cluster_of

NAME = "objects/weights/tiny"


def content(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 17 * SLOT + 5])
async def test_an_object_of_any_size_is_read_back(nbytes):
    async with cluster_of("a", "b") as cluster:
        a, b = (Objects(cluster.stores[name]) for name in "ab")
        data = content(nbytes)
        assert await b.get(NAME) is None
        assert await a.put(NAME, data)
        assert await b.get(NAME) == data
        assert b"".join([part async for part in b.stream(NAME)]) == data
        into = bytearray(nbytes + 3)
        assert await b.get_into(NAME, memoryview(into)) == nbytes
        assert into == data + bytes(3)
        assert (await b.info(NAME)).nbytes == nbytes
        assert await b.exists(NAME)


async def test_another_object_of_that_name_needs_a_word():
    async with cluster_of("a", "b") as cluster:
        objects = Objects(cluster.stores["a"])
        assert await objects.put(NAME, content(9000))
        assert not await objects.put(NAME, content(9000)), "the same bytes again"
        with pytest.raises(Exists, match=r"different content \(9000 bytes\)"):
            await objects.put(NAME, content(9000, seed=1))
        assert await objects.get(NAME) == content(9000)
        assert await objects.put(NAME, content(5000, seed=1), replace=True)
        assert await objects.get(NAME) == content(5000, seed=1)


async def test_a_removed_object_frees_its_chunks():
    async with cluster_of("a", "b") as cluster:
        store = cluster.stores["a"]
        await Objects(store).put(NAME, content(9000))
        assert await Objects(store).remove(NAME)
        assert not await Objects(store).remove(NAME)
        assert await Objects(store).get(NAME) is None
        assert sum(one.local.stats()["dram"]["blocks"] for one in cluster.stores.values()) == 0


async def test_an_object_that_lost_a_chunk_is_missing_and_can_be_put_again():
    async with cluster_of("a") as cluster:
        store = cluster.stores["a"]
        await Objects(store).put(NAME, content(9000))
        manifest = await Objects(store).info(NAME)
        await store.remove_many(chunk_keys(NAME, manifest, 1, 1))
        assert await Objects(store).get(NAME) is None
        assert not await Objects(store).exists(NAME)
        with pytest.raises(LookupError):
            [part async for part in Objects(store).stream(NAME)]
        await Objects(store).put(NAME, content(9000))
        assert await Objects(store).get(NAME) == content(9000)


@pytest.mark.parametrize("name", ["weights", "objects/", ""])
def test_names_are_in_the_key_space(name):
    with pytest.raises(ValueError, match="names start with objects/"):
        manifest_key(name)


@given(st.integers(0, 2**60), st.integers(1, 2**30), st.binary(min_size=16, max_size=16))
def test_a_manifest_is_read_back(nbytes, chunk_bytes, digest):
    manifest = Manifest(nbytes, chunk_bytes, digest)
    assert Manifest.unpack(manifest.pack()) == manifest
    with pytest.raises(ValueError, match="version"):
        Manifest.unpack(b"x" + manifest.pack()[1:])


async def test_a_removed_object_does_not_come_back_from_ssd(tmp_path):
    """Its manifest and chunks may still be on their way to the disk."""
    async with cluster_of() as cluster:
        store = await cluster.add("a", directory=tmp_path)
        for round_ in range(10):
            assert await Objects(store).put(NAME, content(9000, seed=round_))
            assert await Objects(store).remove(NAME)
            await store.local.drain()
            assert await Objects(store).get(NAME) is None
            assert store.local.keys() == []
