"""The pooled store over several nodes, on the in-memory network of fakes.py."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.protocol import Deadlines
from cache.results import GetResult
from net.errors import RemoteError, TransferError
from tests.cache.pooled import QUICK, SLOT, cluster_of, get, key_of, lookup, of_home, put, quiet, until


async def test_what_one_node_puts_another_gets():
    async with cluster_of("a", "b", "c") as cluster:
        assert await put(cluster.stores["a"], range(40)) == 40
        for reader in "abc":
            assert await lookup(cluster.stores[reader], range(41)) == 40
            result = await get(cluster.stores[reader], range(41))
            assert result.blocks == 40
            assert set(result.sources) == {"a", "b", "c"}
            assert result.transports["local"] == result.sources[reader]
            assert result.tiers == {"dram": 40}
        assert await put(cluster.stores["b"], range(40)) == 0


async def test_a_client_without_a_share():
    async with cluster_of("a", "b") as cluster:
        client = await cluster.add("client", slots=0)
        cluster.members.append("client")  # the view may be wrong about it; its own part is then a miss
        assert await put(client, range(20)) == 20
        assert (await get(client, range(20))).blocks == 20
        assert "share" not in client.stats()


async def test_the_only_home_is_the_node_itself():
    async with cluster_of("a") as cluster:
        assert await put(cluster.stores["a"], range(5)) == 5
        result = await get(cluster.stores["a"], range(5))
        assert (result.blocks, result.sources, result.transports) == (5, {"a": 5}, {"local": 5})


async def test_a_pool_without_members_misses():
    async with cluster_of() as cluster:
        client = await cluster.add("client", slots=0)
        assert await put(client, range(3)) == 0
        assert await lookup(client, range(3)) == 0
        assert await get(client, range(3)) == GetResult(0, 0)


async def test_no_keys_are_no_work():
    async with cluster_of("a") as cluster:
        assert await put(cluster.stores["a"], []) == 0
        assert await lookup(cluster.stores["a"], []) == 0
        assert (await get(cluster.stores["a"], [])).blocks == 0
        assert cluster.hub.calls == []


async def test_one_message_per_home_for_a_lookup():
    async with cluster_of("a", "b", "c") as cluster:
        await put(cluster.stores["a"], range(40))
        cluster.hub.calls.clear()
        await lookup(cluster.stores["a"], range(40))
        assert sorted(cluster.hub.calls) == [("a", home, "store.has") for home in "abc"]


async def test_the_run_ends_at_the_first_missing_block():
    async with cluster_of("a", "b", "c") as cluster:
        await put(cluster.stores["a"], [i for i in range(40) if i != 17])
        assert await lookup(cluster.stores["b"], range(40)) == 17
        assert (await get(cluster.stores["b"], range(40))).blocks == 17


async def test_a_lost_home_is_a_miss():
    async with cluster_of("a", "b", "c") as cluster:
        await put(cluster.stores["a"], range(40))
        first_of_c = of_home(cluster, "c", 1)[0]
        cluster.hub.kill("c")
        assert await lookup(cluster.stores["a"], range(40)) == first_of_c
        assert (await get(cluster.stores["a"], range(40))).blocks == first_of_c
        numbers = range(100, 140)
        assert await put(cluster.stores["a"], numbers) == 40, "the next in the ranking stands in"
        assert (await get(cluster.stores["a"], numbers)).blocks == 40


async def test_a_home_lost_during_the_transfer_is_a_miss():
    async with cluster_of("a", "b") as cluster:
        a = cluster.stores["a"]
        numbers = of_home(cluster, "b", 5)
        await put(a, numbers)
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        transfer.started.clear()
        getting = asyncio.create_task(get(a, numbers))
        await transfer.started.wait()
        cluster.hub.kill("b")
        transfer.gate.set()
        assert (await getting).blocks == 0


async def test_a_home_that_hangs_costs_one_deadline():
    async with cluster_of("a", "b", deadlines=Deadlines(lookup_s=0.05, shun_s=1e4)) as cluster:
        a = cluster.stores["a"]
        numbers = of_home(cluster, "b", 3)
        await put(a, numbers)
        cluster.hub.hanging.add("b")
        assert await lookup(a, numbers) == 0
        cluster.hub.calls.clear()
        assert await lookup(a, numbers) == 0
        assert (await get(a, numbers)).blocks == 0
        assert {home for _, home, _ in cluster.hub.calls} == {"a"}, "it is passed over for a while"
        assert await put(a, numbers) == 3
        assert (await get(a, numbers)).sources == {"a": 3}, "the next in the ranking stands in"


@pytest.mark.parametrize("error", [TransferError("broken"), TimeoutError(), RemoteError("no", "no")])
async def test_a_failed_transfer_is_a_miss_and_leaks_nothing(error):
    async with cluster_of("a", "b") as cluster:
        a, numbers = cluster.stores["a"], of_home(cluster, "b", 4)
        await put(a, numbers[:2])
        cluster.hub.transfers["a"].error = error
        assert (await get(a, numbers[:2])).blocks == 0
        assert await put(a, numbers) == 0
        await quiet(cluster.stores["b"])
        assert cluster.stores["b"].stats()["share"]["leases_expired"] == 0, "all were given back in words"
        cluster.hub.transfers["a"].error = None
        assert await put(a, numbers) == 2


async def test_a_block_damaged_at_home_is_dropped_there():
    async with cluster_of("a", "b") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        numbers = of_home(cluster, "b", 6)
        await put(a, numbers)
        slot = b.local._pool.lookup(key_of(numbers[3]))
        b.local.arena.memory(slot)[100] ^= 1
        assert (await get(a, numbers)).blocks == 3
        assert a.stats()["corrupt"] == 1
        await quiet(b)
        await until(lambda: b.local.contains(key_of(numbers[3])) is None)
        assert b.local.stats()["dram"]["corrupt"] == 1
        assert await put(a, numbers) == 1
        assert (await get(a, numbers)).blocks == 6


async def test_a_block_damaged_on_the_way_stays_at_home():
    async with cluster_of("a", "b") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        numbers = of_home(cluster, "b", 6)
        await put(a, numbers)
        cluster.hub.transfers["a"].flip = SLOT * b.local._pool.lookup(key_of(numbers[2]))
        assert (await get(a, numbers)).blocks == 2
        cluster.hub.transfers["a"].flip = None
        await quiet(b)
        assert (await get(a, numbers)).blocks == 6
        assert b.local.stats()["dram"]["corrupt"] == 0


async def test_two_puts_at_once_store_each_block_once():
    async with cluster_of("a", "b") as cluster:
        stored = await asyncio.gather(put(cluster.stores["a"], range(20)), put(cluster.stores["b"], range(20)))
        assert sum(stored) == 20
        assert sum(s.local.stats()["dram"]["blocks"] for s in cluster.stores.values()) == 20
        assert (await get(cluster.stores["a"], range(20))).blocks == 20


async def test_a_home_with_other_blocks_is_passed_over():
    async with cluster_of("a", "b") as cluster:
        a, numbers = cluster.stores["a"], of_home(cluster, "b", 2)
        await put(a, numbers)
        a.block_bytes = SLOT - 8
        assert (await a.get_into([key_of(i) for i in numbers], "kv", [0, SLOT])).blocks == 0
        assert await a.put_from([key_of(10**6)], "kv", [0]) == 0


async def test_the_callers_mistakes_are_errors():
    async with cluster_of("a") as cluster:
        a = cluster.stores["a"]
        with pytest.raises(ValueError, match="attach it first"):
            await a.get_into([key_of(1)], "nowhere", [0])
        with pytest.raises(ValueError, match="1 keys and 2 offsets"):
            await a.put_from([key_of(1)], "kv", [0, SLOT])
        for offset in (-1, 63 * SLOT + 1):
            with pytest.raises(ValueError, match="outside region"):
                await a.get_into([key_of(1)], "kv", [offset])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_use_with_a_death_never_gives_wrong_bytes(tmp_path_factory, seed):
    asyncio.run(random_use(tmp_path_factory.mktemp("store"), seed))


async def random_use(directory, seed):
    rng = random.Random(seed)
    async with cluster_of() as cluster:
        for node in "abc":
            await cluster.add(node, slots=rng.randint(2, 12), directory=directory / node, deadlines=QUICK)
        cluster.stores["a"]._window = cluster.stores["b"]._window = 3

        async def use(store):
            for _ in range(12):
                start = rng.randrange(30)
                numbers = range(start, start + rng.randrange(1, 12))
                await (put if rng.random() < 0.5 else get)(store, numbers)

        users = [asyncio.create_task(use(cluster.stores[node])) for node in "abc"]
        await asyncio.sleep(0.02 * rng.random())
        cluster.hub.kill("c")
        users[rng.randrange(3)].cancel()
        for result in await asyncio.gather(*users, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
