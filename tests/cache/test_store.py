"""The pooled store over several nodes, on the in-memory network of fakes.py."""

import asyncio
import random
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import UNCHECKED, Arena, checksum
from cache.homes import equal_members, homes
from cache.protocol import Deadlines
from cache.results import GetResult
from cache.ssd import SsdTier, backends
from cache.store import Store
from cache.tiers import LocalStore
from net.errors import RemoteError, TransferError
from net.memory import Region
from tests.cache.fakes import Hub

SLOT = 3000
ROOT = b"r" * 16
PATIENT = Deadlines()
QUICK = Deadlines(lookup_s=0.05, control_s=0.05, transfer_s=0.05, lease_s=0.1, room_s=0.05, shun_s=30)


def key_of(i: int) -> bytes:
    return checksum(i.to_bytes(8, "big")).to_bytes(8, "big") + i.to_bytes(8, "big")


def block_of(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


class Cluster:
    """Nodes with shares and a client each; every store has a region `kv` of its own to put from and get into."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.stores = {}
        self.regions = []
        self.members = []

    async def add(self, node_id, slots=64, directory=None, backend="lmdb", deadlines=PATIENT, kv_blocks=64, **options):
        """`slots` 0: a node without a share."""
        leases = {"message_block_bytes": 0, "message_call_bytes": 0}
        options = leases | options | {"block_bytes": SLOT, "deadlines": deadlines}
        channel, transfer = self.hub.node(node_id)
        local = None
        if slots:
            arena = Region.shared(f"{node_id}-dram", slots * SLOT)
            ssd = SsdTier(directory, SLOT, 1 << 20, ROOT, backend=backend) if directory is not None else None
            local = LocalStore(Arena(arena, SLOT), ssd)
            self.regions.append(arena)
            self.members.append(node_id)
        kv = Region.private("kv", kv_blocks * SLOT)
        self.regions.append(kv)
        store = Store(node_id, channel, transfer, local, lambda: equal_members(self.members), **options)
        store.attach(kv)
        store.kv = kv
        self.stores[node_id] = store
        return store

    async def close(self):
        for node_id, store in self.stores.items():
            if store.local is not None and node_id not in self.hub.dead:
                await quiet(store)
                store.local.check_integrity()
            await store.close()
        for region in self.regions:
            region.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.002)


async def quiet(store):
    """Until nothing of the node's share is in use: whatever was leased comes back by itself."""
    await until(lambda: not store.stats()["share"]["leases"] and not store.local.stats()["dram"]["held"])


@asynccontextmanager
async def cluster_of(*nodes: str, **options: Any):
    cluster = Cluster()
    try:
        for node_id in nodes:
            await cluster.add(node_id, **options)
        yield cluster
    finally:
        await cluster.close()


def fill(store, numbers):
    """Blocks `numbers` into the store's kv region; returns keys and offsets."""
    for at, i in enumerate(numbers):
        store.kv.memory[at * SLOT : (at + 1) * SLOT] = block_of(i)
    return [key_of(i) for i in numbers], [at * SLOT for at in range(len(numbers))]


async def put(store, numbers):
    keys, offsets = fill(store, list(numbers))
    return await store.put_from(keys, "kv", offsets)


async def get(store, numbers) -> GetResult:
    """Gets and checks that everything reported is really there."""
    numbers = list(numbers)
    store.kv.memory[:] = bytes(len(store.kv.memory))
    result = await store.get_into([key_of(i) for i in numbers], "kv", [at * SLOT for at in range(len(numbers))])
    for at, i in enumerate(numbers[: result.blocks]):
        assert store.kv.memory[at * SLOT : (at + 1) * SLOT] == block_of(i)
    assert result.nbytes == result.blocks * SLOT
    for counts in (result.sources, result.transports, result.tiers):
        assert sum(counts.values()) == result.blocks
    return result


async def lookup(store, numbers):
    return await store.lookup([key_of(i) for i in numbers])


def home_of(cluster, i):
    return homes(key_of(i), equal_members(cluster.members))[0]


def of_home(cluster, home, count):
    """Numbers of the first `count` blocks whose home is `home`."""
    return [i for i in range(1000) if home_of(cluster, i) == home][:count]


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


async def test_a_block_not_yet_committed_is_a_miss():
    async with cluster_of("a", "b") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        putting = asyncio.create_task(put(a, range(10)))
        await transfer.started.wait()
        assert await lookup(b, range(10)) == 0
        assert (await get(b, range(10))).blocks == 0
        transfer.gate.set()
        assert await putting == 10
        assert (await get(b, range(10))).blocks == 10


async def cancelled(cluster, use):
    """Cancel a get or put of node a in the middle of its first transfer."""
    transfer = cluster.hub.transfers["a"]
    transfer.gate.clear()
    transfer.started.clear()
    using = asyncio.create_task(use)
    await transfer.started.wait()
    cluster.hub.calls.clear()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    transfer.gate.set()


@pytest.mark.parametrize("use", [get, put])
async def test_a_cancelled_call_gives_its_leases_back(use):
    async with cluster_of("a", "b") as cluster:
        a, b, numbers = cluster.stores["a"], cluster.stores["b"], of_home(cluster, "b", 5)
        if use is get:
            await put(a, numbers)
        a._window = 1
        await cancelled(cluster, use(a, numbers))
        assert [kind for _, _, kind in cluster.hub.calls] == ["store.unpin"], "the later windows are not begun"
        await quiet(b)
        assert b.stats()["share"]["leases_expired"] == 0
        assert await put(a, numbers) == (0 if use is get else 5)


async def test_a_lease_that_is_ended_before_its_grant_is_given_back():
    async with cluster_of("a") as cluster:
        b = await cluster.add("b", slots=1)
        (number,) = of_home(cluster, "b", 1)
        entered, go = asyncio.Event(), asyncio.Event()
        wait_for_room = b.local.wait_for_room

        async def slow_room(timeout_s):
            entered.set()
            await go.wait()
            b.local.abandon(blocker)
            return await wait_for_room(timeout_s)

        b.local.wait_for_room = slow_room
        blocker = b.local.reserve(key_of(10**6))
        channel = cluster.hub.channels["a"]
        reserving = asyncio.create_task(channel.call("b", "store.reserve", {"lease": 7}, [key_of(number)]))
        await entered.wait()
        channel.post("b", "store.unpin", {"lease": 7})
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(RemoteError, match="ended before its grant"):
            await reserving
        assert b.local.stats()["dram"]["reserved"] == 0
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 0} == b.stats()["share"]


async def test_a_pinned_block_is_not_evicted_under_a_reader():
    async with cluster_of() as cluster:
        a, b = await cluster.add("a", slots=0), await cluster.add("b", slots=4)
        numbers = of_home(cluster, "b", 12)
        await put(a, numbers[:4])
        transfer = cluster.hub.transfers["a"]
        transfer.gate.clear()
        transfer.started.clear()
        getting = asyncio.create_task(get(a, numbers[:4]))
        await transfer.started.wait()
        assert await put(b, numbers[4:]) == 0
        assert b.stats()["put_no_room"] == 8
        transfer.gate.set()
        assert (await getting).blocks == 4
        assert await put(b, numbers[4:]) > 0


async def test_windows_bound_what_is_leased_at_once():
    async with cluster_of("a", "b") as cluster:
        a = cluster.stores["a"]
        a._window = 3
        assert await put(a, range(40)) == 40
        assert (await get(a, range(40))).blocks == 40


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


async def reserve_and_pin(cluster, reserved, pinned):
    """Node a takes leases on b and never gives them back."""
    call = cluster.hub.channels["a"].call
    await call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
    reply, _ = await call("b", "store.pin", {"lease": 2}, [key_of(pinned)])
    assert len(reply["slots"]) == 1


async def test_leases_end_at_their_deadline():
    """The peer may still be writing to what it reserved: it is cut off first."""
    async with cluster_of("a", "b", deadlines=QUICK) as cluster:
        b = cluster.stores["b"]
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        await quiet(b)
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 2} == b.stats()["share"]
        assert cluster.hub.dropped == [("b", "a")]
        assert await put(b, [reserved]) == 1


async def test_a_peer_that_pins_too_long_is_not_cut_off():
    async with cluster_of("a", "b", deadlines=QUICK) as cluster:
        b = cluster.stores["b"]
        (pinned,) = of_home(cluster, "b", 1)
        await put(b, [pinned])
        await cluster.hub.channels["a"].call("b", "store.pin", {"lease": 1}, [key_of(pinned)])
        await quiet(b)
        assert b.stats()["share"]["leases_expired"] == 1
        assert cluster.hub.dropped == []


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_leases_of_a_peer_that_is_gone_are_given_back(how):
    """Pins at once; a reservation when the transfer engine says that nothing can land there any more."""
    async with cluster_of("a", "b") as cluster:
        b, fence = cluster.stores["b"], cluster.hub.transfers["b"].fence_gate
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        assert b.stats()["share"]["leases"] == 2
        fence.clear()
        for callback in getattr(cluster.hub.channels["b"], f"{how}_callbacks"):
            callback("a")
        assert b.stats()["share"] | {"leases": 1, "leases_expired": 2} == b.stats()["share"]
        assert b.local.stats()["dram"]["reserved"] == b.local.stats()["dram"]["held"] == 1
        fence.set()
        await quiet(b)
        assert await put(b, [reserved]) == 1


async def test_slots_behind_a_fence_that_times_out_stay_held(caplog):
    async with cluster_of("a", "b") as cluster:
        b, transfer = cluster.stores["b"], cluster.hub.transfers["b"]
        (reserved,) = of_home(cluster, "b", 1)
        await cluster.hub.channels["a"].call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
        failures = iter([TimeoutError("still writing"), TimeoutError("still writing")])

        async def fence(peer_id):
            for failure in failures:
                assert b.local.stats()["dram"]["reserved"] == 1
                raise failure

        transfer.fence = fence
        cluster.hub.kill("a")
        await quiet(b)
        assert caplog.text.count("stay held") == 2


async def test_closing_does_not_wait_for_a_fence():
    async with cluster_of("a", "b") as cluster:
        b = cluster.stores["b"]
        (reserved,) = of_home(cluster, "b", 1)
        await cluster.hub.channels["a"].call("b", "store.reserve", {"lease": 1}, [key_of(reserved)])
        cluster.hub.transfers["b"].fence_gate.clear()
        cluster.hub.lose("b", "a")
        await asyncio.sleep(0)
        await b.close()
        assert b.local.stats()["dram"]["held"] == 0


async def test_only_the_owner_ends_a_lease():
    async with cluster_of("a", "b", "c") as cluster:
        a, c, b = cluster.hub.channels["a"], cluster.hub.channels["c"], cluster.stores["b"]
        pinned, reserved = of_home(cluster, "b", 2)
        await put(b, [pinned])
        await reserve_and_pin(cluster, reserved, pinned)
        await c.call("b", "store.unpin", {"lease": 2})
        assert b.stats()["share"]["leases"] == 2
        with pytest.raises(RemoteError, match="expired"):
            await c.call("b", "store.commit", {"lease": 1, "checksums": [1]})
        assert b.local.contains(key_of(reserved)) is None
        with pytest.raises(RemoteError, match="in use"):
            await a.call("b", "store.pin", {"lease": 2}, [key_of(pinned)])
        await a.call("b", "store.unpin", {"lease": 1})
        await a.call("b", "store.unpin", {"lease": 2})
        assert b.stats()["share"] | {"leases": 0, "leases_expired": 0} == b.stats()["share"]


async def test_bad_messages_are_refused_and_leak_nothing():
    async with cluster_of("a", "b") as cluster:
        call = cluster.hub.channels["a"].call
        with pytest.raises(RemoteError, match="not block keys"):
            await call("b", "store.pin", {"lease": 1}, [b"short"])
        await call("b", "store.reserve", {"lease": 1}, [key_of(1)])
        with pytest.raises(RemoteError, match="2 checksums for 1 slots"):
            await call("b", "store.commit", {"lease": 1, "checksums": [1, 2]})
        assert cluster.stores["b"].local.stats()["dram"]["held"] == 0


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


@pytest.mark.parametrize("way", [{}, {"message_call_bytes": 1 << 20}], ids=["transfers", "messages"])
@pytest.mark.parametrize("backend", sorted(backends))
async def test_without_checksums_only_reads_from_ssd_are_compared(tmp_path, way, backend):
    async with cluster_of("client", slots=0, checksums=False, **way) as cluster:
        client = cluster.stores["client"]
        b = await cluster.add("b", slots=4, directory=tmp_path, backend=backend)
        assert await put(client, range(4)) == 4
        await b.local.drain()
        assert (await get(client, range(4))).blocks == 4
        (pin,) = await b.local.pin([key_of(2)])
        assert pin.checksum == UNCHECKED
        b.local.arena.memory(pin.slot)[5] ^= 1
        b.local.unpin([pin.slot])
        await client.get_into([key_of(2)], "kv", [0])
        assert client.kv.memory[:SLOT] != block_of(2), "nobody looked"
        assert await b.local.verify(key_of(2)), "and nobody can tell"
        for i in range(4, 12):
            assert await put(client, [i]) == 1
        await b.local.drain()
        result = await get(client, [2])
        assert result.tiers == {"ssd": 1}, "the copy on SSD is as it was put, and has a checksum"
