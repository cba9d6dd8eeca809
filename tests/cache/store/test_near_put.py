"""Puts to a home of this host: it copies the blocks itself, and never bytes that a caller has changed meanwhile."""

import asyncio
import random

import pytest

from cache.arena import Arena, checksum
from cache.checked_copy import CheckedCopier
from cache.homes.rendezvous import equal_members
from cache.messages import Take
from cache.protocol import Deadlines
from cache.stable_marks import MARKS, StableMarks, holds
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from net.bodies import encode
from net.channel.channel import Channel
from net.errors import RemoteError
from net.loop.clock import loop_time
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from tests.cache.pooled import until

SLOT = 100_000
COUNT = 64
KEYS = [random.Random(i).randbytes(16) for i in range(COUNT)]
BLOCKS = [random.Random(1000 + i).randbytes(SLOT) for i in range(COUNT)]
OFFSETS = [(COUNT - 1 - i) * SLOT for i in range(COUNT)]


class Node:
    """A store over shared memory; with `slots` it is the home of all blocks. `asked`: kinds of messages it gets."""

    def __init__(self, name, slots, shared=True, **options):
        self.channel = Channel(name, {})
        self.transfer = TransferEngine(self.channel, ("shm", "tcp"))
        self.arena = Region.shared("dram", slots * SLOT) if slots else None
        self.local = LocalStore(Arena(self.arena, SLOT), None) if slots else None
        members = equal_members(["home"])
        options = StoreOptions(block_bytes=SLOT, deadlines=Deadlines(), **options)
        self.store = Store(name, self.channel, self.transfer, self.local, lambda: members, options)
        self.kv = (Region.shared if shared else Region.private)("kv", COUNT * SLOT)
        for offset, block in zip(OFFSETS, BLOCKS, strict=True):
            self.kv.memory[offset : offset + SLOT] = block
        self.store.attach(self.kv)
        self.asked = []
        for kind, handler in list(self.channel._handlers.items()):
            self.channel.handle(kind, self.told(kind, handler))

    def told(self, kind, handler):
        async def handle(peer, body, data):
            self.asked.append(kind)
            return await handler(peer, body, data)

        return handle

    async def put(self, part, **options):
        return await self.store.put_from(KEYS[part], "kv", OFFSETS[part], **options)

    async def close(self):
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        if self.local is not None:
            self.local.check_integrity()
            assert self.local.stats()["dram"]["held"] == self.local.stats()["dram"]["reserved"] == 0
        for region in (self.kv, self.arena):
            if region is not None:
                region.close()


async def started(home, client, part=slice(0, 1)):
    """Both are connected and the home maps the client's memory; the blocks of `part` are in the store."""
    address = await home.channel.start("127.0.0.1")
    client.channel.introduce("home", address)
    number = part.start
    await client.put(part)
    taken = client.store._calls.take
    answers = []

    async def noted(*arguments):
        answers.append(await taken(*arguments))
        return answers[-1]

    client.store._calls.take = noted
    async with asyncio.timeout(20):
        while not (answers and answers[-1].mapped):
            await client.put(slice(number, number + 1))
            await asyncio.sleep(0.005)
    await until(lambda: home.store._taking._copier.code is not None)
    home.asked.clear()
    answers.clear()
    return answers


@pytest.fixture(autouse=True)
def no_bulk_puts(monkeypatch):
    """Few bytes also go the way under test."""
    monkeypatch.setattr("cache.store.store.NEAR_BULK_BYTES", 0)


@pytest.fixture
async def pair():
    home, client = Node("home", COUNT), Node("client", 0)
    answers = await started(home, client)
    yield home, client, answers
    await client.close()
    await home.close()


def content(home, i):
    """The home's copy of a block, with its checksum; None if it has none."""
    slot = home.local._pool.lookup(KEYS[i])
    return None if slot is None else (bytes(home.local._slots.memory(slot)), home.local._slots.checksum(slot))


@pytest.mark.parametrize("part", [slice(1, 2), slice(2, 20), slice(20, 64)], ids=["at once", "in turns", "in threads"])
async def test_the_home_copies_the_blocks_and_nothing_else_is_asked(pair, part):
    home, client, answers = pair
    count = part.stop - part.start
    assert await client.put(part) == count
    assert await client.put(part) == 0
    assert [kind for kind in home.asked if kind != "store.take"] == [] and len(answers) == 2
    for i in range(part.start, part.stop):
        assert content(home, i) == (BLOCKS[i], checksum(BLOCKS[i]))
    client.kv.memory[:] = bytes(client.kv.nbytes)
    assert (await client.store.get_into(KEYS[part], "kv", OFFSETS[part])).blocks == count
    assert all(client.kv.memory[OFFSETS[i] : OFFSETS[i] + SLOT] == BLOCKS[i] for i in range(part.start, part.stop))


async def test_values_of_every_length(pair):
    home, client, _ = pair
    values = {KEYS[i]: BLOCKS[i][: 1 + 40 * i] for i in range(1, 40)}
    assert await client.store.put_many(list(values.items())) == [True] * 39  # the staging area is mapped meanwhile
    await until(lambda: any(name[1] == "value-staging" for name in home.store._taking._regions._views))
    await until(lambda: all(rest_until < loop_time() for rest_until, _ in client.store._near._rests.values()))
    more = {KEYS[i]: BLOCKS[i][: 1 + 40 * (i - 40)] for i in range(40, 60)}
    home.asked.clear()
    assert await client.store.put_many(list(more.items())) == [True] * 20
    assert not set(home.asked) & {"store.reserve", "store.write"}
    assert await client.store.get_many(list(values | more)) == list((values | more).values())


async def test_a_node_takes_its_own_blocks_the_same_way():
    home = Node("home", COUNT)
    await home.channel.start("127.0.0.1")
    async with asyncio.timeout(20):
        for i in range(30):
            home.asked.clear()
            assert await home.put(slice(i, i + 1)) == 1
            await asyncio.sleep(0.005)
    assert home.asked == ["store.take"]
    assert content(home, 29) == (BLOCKS[29], checksum(BLOCKS[29]))
    await home.close()


async def test_memory_that_nobody_can_map_goes_another_way():
    home, client = Node("home", COUNT), Node("client", 0, shared=False)
    client.channel.introduce("home", await home.channel.start("127.0.0.1"))
    for i in range(20):
        assert await client.put(slice(i, i + 1)) == 1
    assert "store.take" not in home.asked
    await client.close()
    await home.close()


@pytest.mark.parametrize("part", [slice(1, 3), slice(3, 40)], ids=["few bytes", "in threads"])
async def test_a_put_that_is_given_up_while_the_home_copies_stores_nothing(pair, monkeypatch, part):
    """Its caller changes the memory at once, as it may."""
    home, client, _ = pair
    copied, go = asyncio.Event(), asyncio.Event()
    copy = CheckedCopier.copy

    async def slow(copier, copies):
        sums = await copy(copier, copies)
        copied.set()
        await go.wait()
        return sums

    monkeypatch.setattr("cache.server.taking.AT_ONCE_BYTES", 0)
    monkeypatch.setattr(CheckedCopier, "copy", slow)
    monkeypatch.setattr(client.store._transfer.bulk, "reaches_same_host", lambda peer: False)  # nothing cancels it
    putting = asyncio.create_task(client.put(part))
    await copied.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    client.kv.memory[:] = bytes(client.kv.nbytes)
    go.set()
    await until(lambda: home.local.stats()["dram"]["reserved"] == 0)
    assert all(content(home, i) is None for i in range(part.start, part.stop))


async def test_a_home_that_is_lost_in_between_keeps_nothing(pair, monkeypatch):
    """The put fails at the client, and the home, which is alive, does not store what it copies later."""
    home, client, _ = pair
    copied, go = asyncio.Event(), asyncio.Event()
    copy = CheckedCopier.copy

    async def late(copier, copies):
        copied.set()
        await go.wait()
        return await copy(copier, copies)

    monkeypatch.setattr("cache.server.taking.AT_ONCE_BYTES", 0)
    monkeypatch.setattr(CheckedCopier, "copy", late)
    putting = asyncio.create_task(client.put(slice(5, 9)))
    await copied.wait()
    client.channel.drop("home", "the test has lost it")
    assert await putting == 0
    client.kv.memory[:] = bytes(client.kv.nbytes)
    go.set()
    await until(lambda: home.local.stats()["dram"]["reserved"] == 0)
    assert all(content(home, i) is None for i in range(5, 9))


async def test_a_full_home_says_so(pair):
    home, client, _ = pair
    blockers = [home.local.reservations.reserve(random.Random(i).randbytes(16)) for i in range(5000, 5000 + COUNT - 3)]
    (pin,) = await home.local.pinning.pin_each([KEYS[0]])
    assert await client.put(slice(1, 3)) == 2
    pins = await home.local.pinning.pin_each(KEYS[1:3])
    assert await client.put(slice(3, 6)) == 0
    assert client.store.stats()["put_no_room"] == 3
    home.local.pinning.unpin([pin.slot, *(one.slot for one in pins)])
    for slot in blockers:
        home.local.reservations.abandon(slot)


async def test_without_checksums():
    home, client = Node("home", COUNT, checksums=False), Node("client", 0, checksums=False)
    answers = await started(home, client)
    assert await client.put(slice(1, 9)) == 8 and answers
    assert [content(home, i) for i in range(1, 9)] == [(BLOCKS[i], 0) for i in range(1, 9)]
    await client.close()
    await home.close()


@pytest.mark.parametrize(
    "change", [{"slots": [0, 0]}, {"checksums": []}, {"checksums": ["1"]}, {"mapped": 1}, {"trouble": 5}], ids=str
)
async def test_an_answer_that_is_not_as_agreed_is_that_of_a_home_that_failed(pair, monkeypatch, change):
    _, client, _ = pair
    monkeypatch.setattr("cache.server.taking.encode", lambda answer: encode(answer) | change)
    assert await client.put(slice(1, 2)) == 0
    assert client.store.stats()["home_failures"] == 1
    monkeypatch.undo()
    assert await client.put(slice(2, 3)) == 1


async def test_blocks_outside_the_region_are_refused(pair):
    home, client, _ = pair
    with client.store._near._marks.mark() as mark:
        body = Take(KEYS[1], SLOT, "kv", [client.kv.nbytes - SLOT + 1], mark)
        with pytest.raises(RemoteError) as caught:
            await client.channel.call("home", "store.take", encode(body))
    assert caught.value.code == "bad_request"
    assert content(home, 1) is None


def test_marks():
    marks = StableMarks()
    with marks.mark() as first, marks.mark() as second:
        assert first is not None and second is not None and first[0] != second[0]
        assert holds(marks.region, first) and holds(marks.region, second)
        assert not holds(marks.region, (first[0], second[1]))
        assert not holds(marks.region, (MARKS, first[1])) and not holds(marks.region, (-1, second[1]))
    assert not holds(marks.region, first) and not holds(marks.region, second)
    with marks.mark() as third:
        assert third is not None and third[1] not in (first[1], second[1])
    running = [marks.mark() for _ in range(MARKS + 1)]
    assert [one.__enter__() is not None for one in running] == [True] * MARKS + [False]
    for one in running:
        one.__exit__(None, None, None)
    with marks.mark() as last:
        assert last is not None
    marks.close()
