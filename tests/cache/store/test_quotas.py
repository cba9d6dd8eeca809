"""Puts beyond a tenant's quota, at two homes: which home refuses, what it says, and what it keeps."""

import pytest

from cache.homes.rendezvous import equal_members, homes
from cache.results import OverQuota
from cache.store.scattered import OVER_QUOTA, PRESENT, STORED
from cache.tenants import spaces
from tests.cache.pooled import SLOT, Cluster
from tests.cache.store.test_scattered import scatter

SPACES = spaces("team")


def keys_of_home(space: bytes, home: str, count: int) -> list[bytes]:
    """Keys of which `home` decides."""
    found = (space + i.to_bytes(10, "big") for i in range(1000))
    return [key for key in found if homes(key, equal_members(["a", "b"]))[0] == home][:count]


@pytest.fixture(params=[0, SLOT], ids=["transfers", "messages"])
async def cluster(request):
    """Each block has two copies; home a lets the tenant have one."""
    made = Cluster()
    options = {"replicas": 2, "message_block_bytes": request.param, "message_call_bytes": 8 * request.param}
    await made.add("a", tenants={"team": SLOT}, **options)
    await made.add("b", tenants={"team": None}, **options)
    yield made
    await made.close()


def used(cluster) -> dict[str, int]:
    return {name: store.local.tenants()["team"]["bytes"] // SLOT for name, store in cluster.stores.items()}


async def test_the_deciding_home_refuses_and_no_other_home_is_asked(cluster):
    a = cluster.stores["a"]
    mine, others = keys_of_home(SPACES.names, "a", 2), keys_of_home(SPACES.names, "b", 2)
    blocks = [scatter(key, b"value of " + key) for key in [*mine, *others]]
    assert await a.scattered.put_each(blocks[:1]) == [STORED]
    assert await a.scattered.put_each(blocks[:2]) == [PRESENT, OVER_QUOTA]
    assert used(cluster) == {"a": 1, "b": 1}
    assert await a.scattered.put_each(blocks[2:]) == [STORED] * 2, "b decides; a takes copies without a question"
    assert used(cluster) == {"a": 3, "b": 3}
    with pytest.raises(OverQuota, match="1 of 1 values exceed the quota"):
        await a.put(mine[1], b"value")
    assert await a.get(mine[1]) is None
    assert await a.remove_many([mine[0], *others]) == 6
    assert used(cluster) == {"a": 0, "b": 0} and await a.put(mine[1], b"value")


async def test_a_part_that_one_home_refuses_is_refused(cluster):
    """Its homes do not ask each other, so the writer removes what the other home has stored."""
    b = cluster.stores["b"]
    keys = keys_of_home(SPACES.parts, "a", 1) + keys_of_home(SPACES.parts, "b", 1)
    blocks = [scatter(key, b"part of " + key) for key in keys]
    assert await b.scattered.put_each(blocks[:1], named=True) == [STORED]
    assert await b.scattered.put_each(blocks, named=True) == [PRESENT, OVER_QUOTA]
    assert used(cluster) == {"a": 1, "b": 2}
    assert await b.remove_many(keys) == 3
