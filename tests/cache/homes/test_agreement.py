"""Replicas agree on one value per key: histories of real store nodes on a network with delays, cuts and pauses, under
virtual time. Every test prints its seed."""

import asyncio
import random

import pytest

from cache.arena import checksum
from cache.homes.rendezvous import equal_members, homes
from cache.results import StoreError
from lab.faults.histories import Operation, linearizable
from tests.cache.pooled import SLOT, cluster_of, key_of, quiet
from tests.cache.virtual import Weather, run
from tests.heavy import seeds

WAYS = {"leases": {"message_block_bytes": 0}, "messages": {"message_block_bytes": SLOT}}


@pytest.fixture(params=WAYS)
def way(request):
    """How values travel: through leases and transfers, or, small ones, in the messages themselves."""
    return WAYS[request.param]


def value_of(client, i):
    return f"{client} says {i}".encode()


def now():
    return asyncio.get_running_loop().time()


class Clients:
    """Programs that put and get, and what they saw, by key."""

    def __init__(self, cluster, rng) -> None:
        self.cluster, self.rng, self.histories = cluster, rng, {}

    async def put(self, client, i, value=None):
        value, called = value or value_of(client, i), now()
        try:
            answer, failed = await self.cluster.stores[client].put(key_of(i), value), False
        except StoreError:
            answer, failed = None, True
        self.note(i, Operation("put", called, now(), value, answer, failed))
        return answer

    async def get(self, client, i):
        called = now()
        value = await self.cluster.stores[client].get(key_of(i))
        self.note(i, Operation("get", called, now(), answer=value))
        return value

    def note(self, i, operation):
        self.histories.setdefault(i, []).append(operation)

    async def busy(self, client, numbers, gets=2):
        """Each number once put by this client, in an order of its own, with gets around it."""

        async def one(i):
            await asyncio.sleep(self.rng.random())
            for _ in range(self.rng.randint(0, gets)):
                await self.get(client, i)
            await self.put(client, i)
            for _ in range(self.rng.randint(0, gets)):
                await self.get(client, i)

        await asyncio.gather(*map(one, numbers))


def contents(cluster, i):
    """What lies under the key, by holder."""
    found = {}
    for name, store in cluster.stores.items():
        if store.local is not None and name not in cluster.hub.dead:
            pool, arena = store.local._pool, store.local.arena
            slot = pool.lookup(key_of(i))
            if slot is not None:
                found[name] = bytes(arena.memory(slot)[: store.local._slots._lengths[slot]])
    return found


async def settled(cluster, numbers, seconds=120):
    """Until all holders of each key have the same; what they have."""
    end = now() + seconds
    while any(len(set(contents(cluster, i).values())) > 1 for i in numbers) and now() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    for i in numbers:
        assert len(set(contents(cluster, i).values())) <= 1, f"key {i} has {contents(cluster, i)}"
    return {i: next(iter(contents(cluster, i).values()), None) for i in numbers}


def keepers(cluster):
    for store in cluster.stores.values():
        if store.keeper is not None:
            store.keeper.start()


def seeded(work, seed):
    print(f"seed {seed}")
    run(work(random.Random(seed)))


@pytest.mark.parametrize("nodes,replicas", [("ab", 2), ("abc", 2), ("abc", 3), ("ab", 1)])
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_puts_and_gets_of_one_key_are_linearizable_while_nothing_breaks(way, nodes, replicas, seed):
    async def work(rng):
        async with cluster_of(*nodes, replicas=replicas, slots=256, **way) as cluster:
            for client in "xy":
                await cluster.add(client, slots=0, replicas=replicas, **way)
            cluster.hub.weather = Weather(rng, delay_s=0.3)
            keepers(cluster)
            clients = Clients(cluster, rng)
            await asyncio.gather(*(clients.busy(client, range(60)) for client in "xya"))
            for i, history in clients.histories.items():
                assert linearizable(history), f"key {i}: {history}"
            found = await settled(cluster, range(60), seconds=0)
            for i in range(60):
                assert await clients.get("x", i) == await clients.get("y", i) == found[i]
                assert len(contents(cluster, i)) == replicas

    seeded(work, seed)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "too short to be noticed"])
@pytest.mark.parametrize("seed", range(3))
def test_after_a_partition_all_replicas_have_one_of_the_values_that_were_put(way, noticed, seed):
    async def work(rng):
        async with cluster_of("a", "b", "c", replicas=2, slots=512, **way) as cluster:
            for client in "xy":
                await cluster.add(client, slots=0, replicas=2, **way)
            cluster.hub.weather = weather = Weather(rng)
            keepers(cluster)
            clients = Clients(cluster, rng)
            before = {i: await clients.put("x", i) and value_of("x", i) for i in range(20)}
            weather.cut("ax", "bcy")
            if noticed:
                cluster.unseen = dict.fromkeys("ax", "bc") | dict.fromkeys("bcy", "a")
            both, of_x, of_y = range(100, 140), range(200, 220), range(300, 320)
            await asyncio.gather(clients.busy("x", [*both, *of_x]), clients.busy("y", [*both, *of_y, *range(20)]))
            weather.heal()
            cluster.unseen = {}
            await asyncio.sleep(90)
            found = await settled(cluster, [*range(20), *both, *of_x, *of_y])
            for i in both:
                assert found[i] in (value_of("x", i), value_of("y", i))
            for side, numbers in (("x", of_x), ("y", of_y)):
                for i in numbers:
                    if clients.histories[i][-1].kind == "get" or not clients.histories[i][-1].failed:
                        assert found[i] == value_of(side, i), "nobody else put it"
            for i in range(20):
                assert found[i] in (before[i], value_of("y", i))
            for i, value in found.items():
                assert await clients.get("x", i) == await clients.get("y", i) == value
                for one in clients.histories[i]:
                    assert one.kind == "put" or one.answer in (None, value_of("x", i), value_of("y", i))
                if value is not None:
                    members = equal_members("abc")
                    assert set(contents(cluster, i)) >= set(homes(key_of(i), members, 2))

    seeded(work, seed)


@pytest.mark.parametrize("seed", range(4))
def test_pauses_longer_than_every_deadline_cost_agreement_for_a_while_and_no_slot(way, seed):
    """Nodes and clients stand still for as long as two leases, in the middle of whatever they do."""

    async def work(rng):
        async with cluster_of("a", "b", "c", replicas=2, slots=256, **way) as cluster:
            for client in "xy":
                await cluster.add(client, slots=0, replicas=2, **way)
            cluster.hub.weather = weather = Weather(rng, delay_s=2.0)
            keepers(cluster)
            clients = Clients(cluster, rng)

            async def pauses():
                for _ in range(12):
                    await asyncio.sleep(rng.random() * 8)
                    weather.pause(rng.choice("abcxy"), rng.choice((1, 5, 30, 100)))

            await asyncio.gather(pauses(), *(clients.busy(client, range(40)) for client in "xy"))
            weather.delay_s = 0.01
            await asyncio.sleep(400)
            found = await settled(cluster, range(40))
            for i, history in clients.histories.items():
                said = {one.answer for one in history if one.kind == "get"}
                assert said <= {None, value_of("x", i), value_of("y", i)}
                if any(one.kind == "put" and one.answer for one in history):
                    assert found[i] is not None, "acknowledged"
                assert await clients.get("x", i) == await clients.get("y", i) == found[i]
            for name in "abc":
                await quiet(cluster.stores[name])

    seeded(work, seed)


def test_what_was_removed_while_a_replica_was_away_stays_removed(way):
    async def work(rng):
        async with cluster_of("a", "b", replicas=2, slots=256, **way) as cluster:
            cluster.hub.weather = weather = Weather(rng)
            keepers(cluster)
            clients = Clients(cluster, rng)
            for i in range(60):
                await clients.put("a", i)
            weather.cut("a", "b")
            cluster.unseen = {"a": "b", "b": "a"}
            for i in range(40):
                assert await cluster.stores["a"].remove(key_of(i))
            for i in range(20, 40):
                assert await clients.put("a", i, b"again %d" % i)
            await asyncio.sleep(100)  # longer than a copy that is under way at a removal takes
            weather.heal()
            cluster.unseen = {}
            await asyncio.sleep(60)
            for i in range(20):
                assert contents(cluster, i) == {}
            for i in range(20, 40):
                assert contents(cluster, i) == dict.fromkeys("ab", b"again %d" % i)
            for i in range(40, 60):
                assert contents(cluster, i) == dict.fromkeys("ab", value_of("a", i))
            for i in range(20):
                assert await clients.put("b", i, value_of("a", i)), "the same bytes may be put again"
            assert all(len(contents(cluster, i)) == 2 for i in range(20))

    seeded(work, 1)


async def test_a_node_that_comes_back_with_other_values_on_its_disk_agrees(tmp_path, way):
    """SSD tiers have threads, so this is real time."""
    async with cluster_of(**way) as cluster:
        alone = await cluster.add("b", directory=tmp_path / "b", replicas=2, **way)
        for i in range(20):
            assert await alone.put(key_of(i), b"b %d" % i)
        await alone.close()
        cluster.members.clear()
        a = await cluster.add("a", directory=tmp_path / "a", replicas=2, **way)
        for i in range(20):
            assert await a.put(key_of(i), b"a %d" % i)
        b = await cluster.add("b", directory=tmp_path / "b", replicas=2, **way)
        keepers(cluster)
        winners = [min((b"a %d" % i, b"b %d" % i), key=checksum) for i in range(20)]
        async with asyncio.timeout(20):
            for store in (a, b):
                while True:
                    if all(store.local.content(key_of(i)) == (checksum(v), len(v)) for i, v in enumerate(winners)):
                        break
                    await asyncio.sleep(0.02)
        for store in (a, b):
            await store.flush()
            assert await store.get_many([key_of(i) for i in range(20)]) == winners
        for name in "ab":  # nor does the disk of one of them say anything else
            await quiet(cluster.stores[name])
            into = bytearray(SLOT)
            for i, value in enumerate(winners):
                found = cluster.stores[name].local.ssd.get(key_of(i), into)
                assert found is not None and into[: found.length] == value
