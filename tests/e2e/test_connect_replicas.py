"""ReplicateConfig.replica_num in a pool that keeps one copy of everything: three nodes, two of which are killed."""

from __future__ import annotations

import os
import signal

import pytest

from cache.store.client import Store
from connect.store.distributed_store import MooncakeDistributedStore
from connect.store.replicate_config import ReplicateConfig

SLOT = 64 << 10
VALUES = 40


@pytest.fixture(scope="module")
def pool(start):
    with start("store=3", "--model", "none", "--value-bytes", "64K", "--dram-bytes", "64M") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def address(pool):
    return pool["store-0"].url.removeprefix("http://")


@pytest.fixture(scope="module")
def store(address):
    made = MooncakeDistributedStore()
    assert made.setup({"local_hostname": "localhost", "master_server_addr": address}) == 0
    yield made
    made.close()


@pytest.fixture(scope="module")
def blocks(address):
    """The blocks of all nodes together."""
    with Store(address) as client:
        yield lambda: sum(home["tiers"]["dram"]["blocks"] for home in client.stats()["homes"].values())


def copies(count):
    return ReplicateConfig(replica_num=count)


def test_a_put_makes_as_many_copies_as_it_asks_for(store, blocks):
    before = blocks()
    for count, made in ((1, 1), (2, 2), (3, 3), (9, 3)):
        keys = [f"{count}/{i}" for i in range(10)]
        assert store.put_batch(keys, [b"value"] * 10, copies(count)) == 0
        assert blocks() == before + 10 * made
        assert store.put_batch(keys, [b"other"] * 10, copies(3)) == 0
        assert blocks() == before + 10 * made, "the first put of a name counts"
        assert store.get_batch(keys) == [b"value"] * 10
        assert store.upsert(keys[0], b"replaced", copies(2)) == 0
        assert blocks() == before + 9 * made + 2
        assert store.batch_remove(keys) == [0] * 10
        assert blocks() == before, "no copy is left"
    large = os.urandom(3 * SLOT)
    assert store.put("large", large, copies(2)) == 0
    assert blocks() == before + 2 * 4, "three parts and the head"
    assert (store.get("large"), store.remove("large"), blocks()) == (large, 0, before)


def test_values_outlive_as_many_nodes_as_they_have_further_copies(pool, store):
    values = {
        count: {f"lost/{count}/{i}": os.urandom(SLOT * (i % 3) + 10) for i in range(VALUES)} for count in (1, 2, 3)
    }
    for count, some in values.items():
        assert store.put_batch(list(some), list(some.values()), copies(count)) == 0
    pool.kill("store-2", signal.SIGKILL)
    for count in (2, 3):
        assert store.get_batch(list(values[count])) == list(values[count].values())
    assert b"" in store.get_batch(list(values[1])), "a third of these had their only copy there"
    assert store.batch_is_exist(list(values[2])) == [1] * VALUES
    pool.kill("store-1", signal.SIGKILL)
    assert store.get_batch(list(values[3])) == list(values[3].values())
    assert store.batch_is_exist(list(values[3])) == [1] * VALUES
