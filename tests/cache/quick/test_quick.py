"""Gets and puts of a thread, at three homes over real sockets and shared memory; an event loop serves meanwhile."""

import asyncio
import random
import threading

import pytest

from cache.homes.rendezvous import equal_members, homes
from cache.quick.quick_get import QuickGet
from cache.quick.quick_put import QuickPut
from cache.quick.routes import Routes
from cache.tiers.local_store import NoSpace
from net.transfer.tcp.blocking_calls import BlockingCalls
from tests.cache.store.test_store_net import BLOCKS, COUNT, KEYS, OFFSETS, SLOT, Node, fill

HOMES = ["a", "b", "c"]
SPIN_S = 100e-6
FIT = [0, 1, 2, 3, 4, 8, 11, 12, 15, 16, 17, 23]
"""Numbers of blocks of which no home gets more than five: they fit into its DRAM."""


class Quick:
    """A client without a share, and its calls from other threads."""

    def __init__(self, node):
        self.node = node
        self.calls = BlockingCalls(node.channel.links, SPIN_S)
        self.routes = Routes(asyncio.get_running_loop(), node.store, node.transfer, self.calls)
        self.getter, self.putter = QuickGet(self.routes), QuickPut(self.routes)
        node.store.attach(self.putter.region)

    async def put(self, numbers, blocks=BLOCKS):
        """Every block in three pieces."""
        some = [
            [memoryview(blocks[i])[:1], memoryview(blocks[i])[1:5000], memoryview(blocks[i])[5000:]] for i in numbers
        ]
        done = await asyncio.to_thread(self.putter.put, [KEYS[i] for i in numbers], some)
        return {numbers[at] for at in done}

    async def get(self, numbers, wanted=lambda at, nbytes: True):
        """What arrived is compared."""
        rooms = {}

        def room(at, nbytes):
            if not wanted(at, nbytes):
                return None
            rooms[at] = bytearray(nbytes)
            view = memoryview(rooms[at])
            return [view[: nbytes // 3], view[nbytes // 3 :]]

        arrived = await asyncio.to_thread(self.getter.get, [KEYS[i] for i in numbers], room)
        assert all(rooms[at] == BLOCKS[numbers[at]] for at in arrived)
        return {numbers[at] for at in arrived}

    async def close(self):
        self.calls.close()
        self.getter.close()
        self.putter.close()
        await self.node.close()


@pytest.fixture(params=[("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
async def pool(request, tmp_path):
    """Homes with six slots in DRAM each, and a client whose paths are open."""
    made = [Node(name, request.param, HOMES, tmp_path / name) for name in HOMES]
    client = Node("client", request.param, HOMES, None)
    for i, node in enumerate([*made, client]):
        await node.start([*made, client][:i])
    quick = Quick(client)
    fill(client)
    assert await quick.put(FIT) == set(), "no path is open yet: the event loop opens it"
    await client.store.lookup(KEYS)
    async with asyncio.timeout(20):
        while not all(client.transfer.path_seen(home) for home in HOMES):
            await quick.put(FIT)
            await asyncio.sleep(0.01)
    await client.store.remove_many(KEYS)
    warm = [random.Random(f"warm {i}").randbytes(16) for i in range(9)]
    await client.store.put_from(warm, "kv", OFFSETS[:9])
    async with asyncio.timeout(20):
        while request.param[0] == "shm" and not all(client.store.same_host.known(home) for home in HOMES):
            await client.store.lookup(warm)
            await asyncio.sleep(0.01)
    await client.store.remove_many(warm)
    for home in made:
        await home.local.drain()
    quick.homes = {node.node_id: node for node in made}
    yield quick
    await quick.close()
    for node in made:
        await node.close()


def home_of(i):
    return homes(KEYS[i], equal_members(HOMES))[0]


async def test_what_one_thread_puts_another_gets_and_the_first_value_stays(pool):
    some = FIT[:8]
    assert await pool.put(some) == set(some)
    assert await pool.get(some) == set(some)
    others = [bytes(SLOT)] * COUNT
    assert await pool.put(some, others) == set(some), "present"
    assert await pool.get(some) == set(some)
    assert await pool.node.store.lookup([KEYS[i] for i in some]) == len(some), "the event loop finds them, too"
    assert await pool.get([*some, 20]) == set(some)
    assert await pool.get(some, lambda at, nbytes: at % 2 and nbytes == SLOT) == set(some[1::2])


async def test_blocks_of_several_questions(pool, monkeypatch):
    monkeypatch.setattr("cache.quick.quick_put.ASK_BYTES", 2 * SLOT)
    monkeypatch.setattr("cache.quick.quick_get.ASK_BYTES", 2 * SLOT)
    assert await pool.put(FIT) == set(FIT)
    assert await pool.get(FIT) == set(FIT)


async def test_threads_ask_at_the_same_time(pool):
    ends = await asyncio.gather(*(pool.put([i]) for i in FIT))
    assert ends == [{i} for i in FIT]
    pairs = list(zip(FIT, FIT[::-1], strict=True))
    assert await asyncio.gather(*(pool.get(list(pair)) for pair in pairs)) == [set(pair) for pair in pairs]


async def test_gets_out_of_memory_ask_nobody(pool, request):
    if "tcp" in request.node.callspec.id:
        return
    await pool.put([1, 2])

    def asked(*arguments):
        raise AssertionError("a question")

    pool.calls.ask = asked
    hits = sum(home.local.stats()["dram"]["hits"] for home in pool.homes.values())
    assert await pool.get([1, 2]) == {1, 2}
    async with asyncio.timeout(20):
        while sum(home.local.stats()["dram"]["hits"] for home in pool.homes.values()) < hits + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_damaged_blocks_do_not_arrive(pool):
    await pool.put([3, 4])
    home = pool.homes[home_of(3)]
    slot = home.local._pool.lookup(KEYS[3])
    home.local._slots.memory(slot)[777] ^= 1
    assert await pool.get([3, 4]) == {4}


async def test_a_home_that_is_gone_costs_only_its_blocks(pool):
    await pool.put(FIT[:6])
    gone = home_of(0)
    await pool.homes[gone].channel.close()
    assert {i for i in FIT[:6] if home_of(i) != gone} <= await pool.get(FIT[:6])
    assert await pool.put(FIT[6:]) == {i for i in FIT[6:] if home_of(i) != gone}


async def test_a_home_that_hangs_is_given_up(pool, monkeypatch):
    """It is stopped in the middle of its work: a thread holds its event loop, which is this one."""
    await pool.put([5])
    pool.routes.wait_s = 0.2
    done, ends = threading.Event(), []

    def work():
        ends.append(pool.putter.put([KEYS[6]], [[memoryview(BLOCKS[6])]]))
        ends.append(pool.calls.reaches(home_of(6)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(10)  # the loop does not run meanwhile
    thread.join()
    assert ends == [{}, False]
    assert await pool.node.store.lookup([KEYS[5]]) == 1


async def test_a_full_home_is_left_to_the_event_loop(pool):
    home = pool.homes[home_of(7)]
    slots = []
    with pytest.raises(NoSpace):
        while True:
            slots.append(home.local.reservations.reserve(b"%016d" % len(slots), None))
    assert await pool.put([7]) == set()
    for slot in slots:
        home.local.reservations.abandon(slot)
    assert await pool.put([0, 7]) == {0}, "another node may have the other one now"
    assert home_of(0) == home_of(7)
