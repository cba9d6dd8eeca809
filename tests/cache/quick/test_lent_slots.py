"""Puts into slots that homes of this host lend: nobody is asked, and every question finds the block."""

import asyncio
import os
import random
import signal
import sys
import threading
import weakref
from contextlib import asynccontextmanager, suppress
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from cache.arena import Arena, checksum
from cache.homes.rendezvous import equal_members, homes
from cache.index.loans import ASLEEP, CLOSED, LENT, LOANS_BYTES
from cache.messages import Take, Write
from cache.offer import Contents, Offer
from cache.protocol import KEPT, OTHER, PRESENT, STORED, Deadlines
from cache.quick.quick_get import QuickGet
from cache.quick.quick_put import QuickPut
from cache.quick.routes import Routes
from cache.ssd import SsdTier
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore, NoSpace
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from net.transfer.tcp.blocking_calls import BlockingCalls

PROJECT = Path(__file__).parents[3]
SLOT, SLOTS = 80_000, 96  # the first borrower gets six slots of each home, the next one three
ROOT = b"r" * 16
HOMES = ["a", "b"]


def key_of(i):
    return random.Random(i).randbytes(16)


def block_of(i, nbytes=SLOT):
    return random.Random(1000 + i).randbytes(nbytes)


def home_of(i):
    return homes(key_of(i), equal_members(HOMES))[0]


class Node:
    """A home, or a client without a share."""

    def __init__(self, node_id, order, has_share, directory=None):
        self.node_id = node_id
        self.channel = Channel(node_id, {"root": ROOT.hex()}, lambda hello: None)
        self.transfer = TransferEngine(self.channel, order)
        self.arena = Region.shared(f"{node_id}-dram", SLOTS * SLOT)
        ssd = None if directory is None else SsdTier(directory / node_id, SLOT, 64 * SLOT, ROOT)
        self.local = LocalStore(Arena(self.arena, SLOT), ssd) if has_share else None
        options = StoreOptions(block_bytes=SLOT, deadlines=Deadlines())
        self.members = list(HOMES)
        self.store = Store(
            node_id, self.channel, self.transfer, self.local, lambda: equal_members(self.members), options
        )
        self.kv = Region.shared("kv", 4 * SLOT)
        self.store.attach(self.kv)

    @property
    def lending(self):
        return self.store._share.lending

    async def start(self, others):
        address = await self.channel.start("127.0.0.1", 0)
        for other in others:
            self.channel.introduce(other.node_id, other.channel.links.address)
            other.channel.introduce(self.node_id, address)

    async def close(self):
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        if self.local is not None:
            self.local.check_integrity()
            usage = self.local._pool.usage()
            assert usage["held"] == 0 and usage["free"] + usage["cached"] == SLOTS, "no slot stays lent"
        self.arena.close()
        self.kv.close()


class Client:
    """Calls of threads."""

    def __init__(self, node):
        self.node = node
        self.calls = BlockingCalls(node.channel.links, 100e-6)
        self.routes = Routes(asyncio.get_running_loop(), node.store, node.transfer, self.calls)
        self.getter, self.putter = QuickGet(self.routes), QuickPut(self.routes)
        node.store.attach(self.putter.region)
        self.asked = []
        ask = self.calls.ask
        self.calls.ask = lambda questions, wait_s: self.asked.append(questions) or ask(questions, wait_s)

    def put_now(self, numbers, block=block_of):
        blocks = [[memoryview(bytearray(block(i)))[:100], memoryview(bytearray(block(i)))[100:]] for i in numbers]
        return {numbers[at] for at in self.putter.put([key_of(i) for i in numbers], blocks)}

    async def put(self, numbers, block=block_of):
        return await asyncio.to_thread(self.put_now, numbers, block)

    def get_now(self, numbers):
        rooms = {}

        def room(at, nbytes):
            rooms[at] = bytearray(nbytes)
            return [memoryview(rooms[at])]

        arrived = self.getter.get([key_of(i) for i in numbers], room)
        return {numbers[at]: bytes(rooms[at]) for at in arrived}

    async def get(self, numbers):
        return await asyncio.to_thread(self.get_now, numbers)

    async def borrow(self):
        """Until all homes have lent slots: puts alone lead to that."""
        number = 10_000_000
        await self.node.store.lookup([key_of(i) for i in range(8)])  # connects
        async with asyncio.timeout(20):
            while len(self.putter._lent._borrowed) < len(HOMES):
                await self.put([number, number + 1, number + 2, number + 3])
                number += 4
                await asyncio.sleep(0.01)
        await self.node.store.remove_many([key_of(i) for i in range(10_000_000, number)])
        self.asked.clear()

    async def close(self):
        self.calls.close()
        self.getter.close()
        self.putter.close()
        await self.node.close()


@asynccontextmanager
async def homes_and_clients(directory=None):
    """Two homes, with SSD tiers if there is a directory for them, a client on their host to which they lend slots, and
    one that reaches them by TCP only."""
    made = [Node(name, ("shm", "tcp"), True, directory) for name in HOMES]
    near, far = Node("near", ("shm", "tcp"), False), Node("far", ("tcp",), False)
    for i, node in enumerate([*made, near, far]):
        await node.start([*made, near, far][:i])
    client = Client(near)
    client.far, client.homes = far, {node.node_id: node for node in made}
    await client.borrow()
    yield client
    await client.close()
    await far.close()
    for node in made:
        await node.close()


@pytest.fixture
async def pool():
    async with homes_and_clients() as made:
        yield made


async def test_a_put_asks_nobody_and_every_question_finds_it(pool):
    some = list(range(6))
    assert await pool.put(some) == set(some)
    assert pool.asked == []
    assert await pool.far.store.lookup([key_of(i) for i in some]) == 6, "asked before the homes looked on their own"
    assert await pool.far.store.get_many([key_of(i) for i in some]) == [block_of(i) for i in some]
    assert await pool.get(some) == {i: block_of(i) for i in some}
    assert await pool.node.store.remove_many([key_of(i) for i in some]) == 6
    assert await pool.get(some) == {}


async def take(pool, keys, offer):
    """The answer to TAKE of a client that puts 400 zeros under each of two keys, once the home maps its memory."""
    with pool.node.store.marks().mark() as mark:
        body = Take(b"".join(keys), SLOT, "kv", [0, SLOT], mark, [400] * 2, offer=offer)
        async with asyncio.timeout(20):
            while not (taken := await pool.node.store._calls.take("a", body, 2)).mapped:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return taken


OURS = [i for i in range(1, 99) if home_of(i) == "a"][:2]
LATE = [key_of(i) for i in OURS]


async def second_put(pool, key):
    return not await pool.far.store.put(key, b"x")


async def second_take(pool, key):
    return (await take(pool, [key, LATE[1]], Offer(decide=True))).slots == [PRESENT, STORED]


async def pinned(pool, key):
    return await pool.far.store._calls.keep("a", [key]) == [KEPT]


async def told(pool, key):
    return pool.homes["a"].store.stats() and pool.homes["a"].local.contains(key)


@pytest.mark.parametrize(
    "ask",
    [
        lambda pool, key: pool.far.store.exists(key),
        lambda pool, key: pool.far.store.get(key),
        lambda pool, key: pool.far.store.remove(key),
        lambda pool, key: pool.far.store.keys_of_homes(key[:4]),
        lambda pool, key: pool.far.store.outsets([key], 8),
        lambda pool, key: pool.node.store.get(key),
        second_put,
        second_take,
        pinned,
        told,
    ],
    ids=["has", "get", "remove", "list", "outsets", "loop", "put", "take", "keep", "stats"],
)
async def test_each_kind_of_question_finds_what_was_just_announced(pool, ask, monkeypatch):
    monkeypatch.setattr("cache.server.lending.PERIOD_S", 3600.0)  # no home looks on its own
    await asyncio.sleep(0.01)  # nor does a timer that was set before
    assert await pool.put(OURS[:1]) == {OURS[0]}
    assert pool.asked == []
    assert await ask(pool, LATE[0])


async def test_what_was_just_announced_is_made_durable(tmp_path, monkeypatch):
    async with homes_and_clients(tmp_path) as pool:
        monkeypatch.setattr("cache.server.lending.PERIOD_S", 3600.0)
        await asyncio.sleep(0.01)
        assert await pool.put(OURS[:1]) == {OURS[0]}
        assert await pool.far.store._calls.durable("a", LATE[:1]) == ([True], "")
        assert await pool.put(OURS[1:]) == {OURS[1]}
        await pool.far.store._calls.flush("a")
        assert pool.homes["a"].local.ssd.contains(LATE[1])
        assert pool.asked == []


async def test_the_first_value_stays_in_whatever_way_the_second_comes(pool):
    assert await pool.put([1]) == {1}
    assert await pool.put([1], lambda i: bytes(SLOT)) == {1}, "it is there"
    assert not await pool.far.store.put(key_of(1), b"x" * 1000)
    assert await pool.far.store.get(key_of(1)) == block_of(1)
    await pool.far.store.put(key_of(2), b"y" * 1000)
    assert await pool.put([2]) == {2}
    assert await pool.far.store.get(key_of(2)) == b"y" * 1000


async def test_a_put_that_is_done_comes_before_one_that_still_arrives(pool):
    home = pool.homes[home_of(1)]
    slot = home.local.reservations.reserve(key_of(1))
    assert await pool.put([1]) == {1}
    assert await pool.far.store.get(key_of(1)) == block_of(1)
    home.local._slots._arena.memory(slot)[:5] = b"other"
    home.local.commit(key_of(1), slot, checksum(b"other"), 5)
    assert await pool.far.store.get(key_of(1)) == block_of(1)


async def put_late(pool):
    return [await pool.far.store.put(key, b"late" * 100, pin=True) for key in LATE]


async def write_late(pool):
    body = Write([400] * 2, [checksum(b"late" * 100)] * 2, Offer(decide=True))
    taken = await pool.far.store._calls.write("a", LATE, [b"late" * 100] * 2, body)
    return [answer == STORED for answer in taken.slots]


async def reserve_late(pool):
    with pool.far.store._calls.ticket("a") as ticket:
        await pool.far.store._calls.reserve("a", LATE, ticket, Offer(decide=True))
        answers = await pool.far.store._calls.commit("a", [checksum(bytes(400))] * 2, ticket, [400] * 2)
    return [answer == STORED for answer in answers]


async def take_late(pool):
    taken = await take(pool, LATE, Offer(decide=True))
    assert len(taken.checksums) == 1
    return [answer == STORED for answer in taken.slots]


def let_pass(home, key, value, monkeypatch):
    """A lent slot with this value is settled when other bytes of the key have arrived, right before they enter."""
    granting, local = home.store._share._granting, home.local
    arrived = granting.arrived

    def late(arriving, *rest, **options):
        if arriving == key and local.contains(key) is None:
            slot = local.reservations.lend()
            local._slots._arena.memory(slot)[: len(value)] = value
            assert local.enter_lent(key, slot, checksum(value), len(value))
            local.reservations.take_back(slot)
        return arrived(arriving, *rest, **options)

    monkeypatch.setattr(granting, "arrived", late)


@pytest.mark.parametrize("put", [put_late, write_late, reserve_late, take_late])
async def test_a_put_whose_bytes_arrive_after_another_value_is_told_so(pool, put, monkeypatch):
    let_pass(pool.homes["a"], LATE[0], b"lent", monkeypatch)
    assert await put(pool) == [False, True]
    assert await pool.far.store.get(LATE[0]) == b"lent"


@pytest.mark.parametrize("lesser", ["copy", "lent"])
async def test_a_copy_that_arrives_after_another_value_is_compared_with_it(pool, lesser, monkeypatch):
    """In whatever order the values of two homes meet, the same one stays. It keeps the pin of the key."""
    values = sorted([b"one" * 100, b"two" * 100], key=lambda value: (checksum(value), len(value)))
    lent, copy = values if lesser == "lent" else values[::-1]
    home, total = pool.homes["a"], checksum(copy)
    let_pass(home, LATE[0], lent, monkeypatch)
    offer = Offer(repair=True, kept=[True], contents=Contents([total], [len(copy)]))
    taken = await pool.far.store._calls.write("a", LATE[:1], [copy], Write([len(copy)], [total], offer))
    assert taken.slots == ([OTHER] if lesser == "lent" else [STORED])
    assert await pool.far.store.get(LATE[0]) == values[0]
    assert home.local.is_kept(LATE[0])
    home.local.check_integrity()


def fill(home):
    """Take all the room of a home; returns the slots."""
    slots = []
    with suppress(NoSpace):
        while True:
            slots.append(home.local.reservations.reserve(os.urandom(16)))
    return slots


async def test_no_lent_slots_are_filled_while_values_are_at_another_home(pool):
    """A home without room has sent a writer on: a later value of that key must not enter here."""
    home = pool.homes[home_of(1)]
    taken = fill(home)
    assert await pool.far.store.put(key_of(1), b"first" * 100)
    assert home.local.contains(key_of(1)) is None
    for slot in taken:
        home.local.reservations.abandon(slot)
    await pool.put([1])
    assert pool.asked != [], "the home was asked"
    assert await pool.far.store.get(key_of(1)) == b"first" * 100
    assert not await pool.far.store.put(key_of(1), b"third" * 100)
    assert await pool.far.store.remove(key_of(1))
    other = pool.homes[next(name for name in HOMES if name != home.node_id)]
    assert other.local.contains(key_of(1)) is None
    home.store._share._passed_on.discard(key_of(1))  # the repair does it, once the home has the value
    async with asyncio.timeout(20):
        while home.lending._rows.mood == CLOSED:
            await pool.put([1])
            await asyncio.sleep(0.05)


async def test_what_is_announced_before_a_home_sends_writers_on_comes_first(pool, monkeypatch):
    monkeypatch.setattr("cache.server.lending.PERIOD_S", 3600.0)
    await asyncio.sleep(0.01)
    home = pool.homes[home_of(1)]
    share, taken, grant = home.store._share, fill(home), home.store._share._granting.grant

    def late(*question):
        """Between the home's look and its answer."""
        monkeypatch.setattr(share._granting, "grant", grant)
        answers = grant(*question)
        assert pool.put_now([1]) == {1}
        return answers

    monkeypatch.setattr(share._granting, "grant", late)
    assert not await pool.far.store.put(key_of(1), b"second" * 100)
    assert await pool.far.store.get(key_of(1)) == block_of(1)
    for slot in taken:
        home.local.reservations.abandon(slot)


def no_hold(pool, lent, monkeypatch):
    monkeypatch.setattr(pool.routes, "hold", lambda home: None)


def not_mapped(pool, lent, monkeypatch):
    for one in lent._borrowed.values():
        memory = one.arena.memory[:0]
        memory.release()
        monkeypatch.setattr(one.arena, "memory", memory)


def outside(pool, lent, monkeypatch):
    monkeypatch.setattr("cache.quick.lent_slots.Borrowed.target", lambda *asked: None)


def broken(pool, lent, monkeypatch):
    monkeypatch.setattr(lent, "_code", None)


def raises(pool, lent, monkeypatch):
    def fill(*asked):
        raise MemoryError

    monkeypatch.setattr(lent._code, "fill", fill)


@pytest.mark.parametrize("fail", [no_hold, not_mapped, outside, broken, raises])
async def test_a_put_that_fails_costs_no_slot(pool, fail, monkeypatch):
    lent = pool.putter._lent
    with monkeypatch.context() as failing:
        fail(pool, lent, failing)
        for i in range(64):
            with suppress(MemoryError):
                assert not lent.put(home_of(i), key_of(i), [memoryview(bytearray(SLOT))], SLOT)
    some = list(range(6))
    assert await pool.put(some) == set(some)
    assert pool.asked == []


@pytest.mark.parametrize("odd", ["loans", "slots"])
async def test_a_home_of_another_form_keeps_no_other_from_lending(pool, odd, monkeypatch):
    lent, views = pool.putter._lent, pool.node.store.same_host._views
    async with asyncio.timeout(20):
        while pool.routes._borrowing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    if odd == "slots":
        monkeypatch.setattr(views["a"].blocks, "slot_bytes", SLOT // 2)
    else:
        monkeypatch.setattr("cache.index.loans.LOANS_BYTES", 64)
    lent._borrowed.clear()
    with Region.shared("store-loans", LOANS_BYTES) as region:
        lent._answered("a", (region, 0))
    monkeypatch.undo()
    assert lent._borrowed == {}
    numbers = iter(range(100, 10_000))
    async with asyncio.timeout(20):
        while "b" not in lent._borrowed:
            await pool.put([next(numbers)])
            await asyncio.sleep(0.05)
    assert "a" not in lent._borrowed, "it is not asked again for a while"


async def test_values_of_every_size(pool):
    sizes = {1: 1, 2: 240, 3: 241, 4: 4096, 5: 65_535, 6: SLOT - 1, 7: SLOT}
    for i, nbytes in sizes.items():
        await pool.put([i], lambda i, nbytes=nbytes: block_of(i, nbytes))
    short = [i for i, nbytes in sizes.items() if nbytes <= 240]
    assert len(pool.asked) == len(short), "the others are in lent slots"
    assert await pool.far.store.get_many([key_of(i) for i in sizes if i not in short]) == [
        block_of(i, nbytes) for i, nbytes in sizes.items() if i not in short
    ]


async def test_threads_put_and_read_while_the_homes_evict(pool):
    """Three times as many blocks as slots: a reader gets the block, or nothing."""
    count, wrong, ends = 3 * 2 * SLOTS, [], []

    def work(part):
        done = set()
        for i in range(part, count, 3):
            done |= pool.put_now([i])
            wrong.extend(j for j, block in pool.get_now([i, max(0, i - 9)]).items() if block != block_of(j))
        ends.append(done)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert wrong == []
    done = set().union(*ends)
    assert len(done) > count // 2
    assert sum(len(questions) for questions in pool.asked) < count, "most go into lent slots"
    whole = False
    while not whole:  # the last announced blocks may still evict some
        here = [i for i in range(count) if pool.homes[home_of(i)].local.contains(key_of(i))]
        found = await pool.far.store.get_many([key_of(i) for i in here])
        assert all(block in (None, block_of(i)) for i, block in zip(here, found, strict=True))
        whole = None not in found
    assert len(here) > SLOTS
    for home in pool.homes.values():
        home.local.check_integrity()
        assert len(home.lending) <= SLOTS / 8


async def test_damage_is_found(pool):
    assert await pool.put([1, 2]) == {1, 2}
    assert await pool.far.store.lookup([key_of(1), key_of(2)]) == 2
    home = pool.homes[home_of(1)]
    home.local._slots.memory(home.local._pool.lookup(key_of(1)))[777] ^= 1
    assert await pool.get([1, 2]) == {2: block_of(2)}
    assert await pool.far.store.get_many([key_of(1), key_of(2)]) == [None, block_of(2)]


async def test_an_impossible_announcement_is_dropped(pool):
    home = pool.homes[home_of(1)]
    loan = home.lending._loans["near"]
    row, slot = next(iter(loan.slots.items()))
    rows = home.lending._rows
    at = 8 + loan.page * 320 + row * 5
    rows._words[at + 1] = slot | (SLOT + 1) << 32
    rows._words[at] = rows.next_number
    rows._words[0] += 1
    rows._words[1] += 1
    home.lending.settle()
    assert rows.states(loan.page)[row] == LENT, "another slot, or the same"
    home.local.check_integrity()


async def test_blocks_enter_in_the_order_of_their_announcements(pool, monkeypatch):
    """What comes while a home looks waits for its next look, so it cannot pass what came before it."""
    monkeypatch.setattr("cache.server.lending.PERIOD_S", 3600.0)
    await asyncio.sleep(0.01)
    home = pool.homes[home_of(1)]
    rows, entered = home.lending._rows, []
    monkeypatch.setattr(home.lending, "_stored", entered.append)
    same = [i for i in range(1, 99) if home_of(i) == home.node_id][:4]
    first = rows.next_number
    for i in same[::-1]:
        assert await pool.put([i]) == {i}
    rows._words[0] = first + 3  # the last of them comes during the look
    home.lending.settle()
    assert entered == [key_of(i) for i in same[:0:-1]]
    rows._words[0], rows._words[1] = first + 4, rows.announced + 1
    home.lending.settle()
    assert entered == [key_of(i) for i in same[::-1]]


async def test_a_home_that_sleeps_is_woken(pool):
    home = pool.homes[home_of(1)]
    async with asyncio.timeout(20):
        while home.lending._rows.mood != ASLEEP or home.lending._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await pool.put([1]) == {1}
    async with asyncio.timeout(20):
        while home.local._pool.lookup(key_of(1)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert pool.asked == []


async def test_a_home_that_leaves_has_all_that_was_put_and_takes_no_more(pool):
    home = pool.homes[home_of(1)]
    assert await pool.put([1]) == {1}
    home.lending.end()
    assert home.local.contains(key_of(1)) == "dram"
    other = next(i for i in range(2, 99) if home_of(i) == home.node_id)
    lent = pool.putter._lent
    views = [memoryview(bytearray(block_of(other)))]
    assert not lent.put(home.node_id, key_of(other), views, SLOT), "it may not be stored"
    assert home.lending._rows.mood == CLOSED


async def test_slots_of_a_lost_client_return_when_it_cannot_write_any_more(pool):
    home = pool.homes[home_of(1)]
    lent = len(home.lending)
    assert lent
    hold = pool.node.transfer.hold(home.node_id)
    one = pool.putter._lent._borrowed[home.node_id]
    row = one.claim()
    home.channel.drop("near", "a test")
    await asyncio.sleep(0.1)
    assert len(home.lending) == lent, "a thread still writes"
    content = bytearray(block_of(1))
    target = home.arena.address + one.loans.slot(one.page, row) * SLOT
    places = [(addressof(c_char.from_buffer(content)), SLOT)]
    row_address = one.loans.address(one.page, row)
    pool.putter._lent._code.fill(one.loans, row_address, target, places, SLOT, key_of(1))
    hold.release()
    async with asyncio.timeout(20):
        while len(home.lending):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert home.local.contains(key_of(1)) == "dram", "what it announced until then is here"
    assert await pool.far.store.get(key_of(1)) == block_of(1)


async def test_the_memory_of_a_lost_home_is_not_kept(pool):
    """Also if a thread copies when the loss is seen."""
    home, one = pool.homes["a"], pool.putter._lent._borrowed["a"]
    loans, arena, mapping = weakref.ref(one.loans), weakref.ref(one.arena), weakref.ref(one.arena._mapping)
    copying = one.arena.memory[:0]
    del one
    await home.transfer.close()
    await home.channel.close()
    async with asyncio.timeout(20):
        while loans() is not None or arena() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert mapping() is not None
    copying.release()
    assert mapping() is None


async def killed(*ports):
    """The child process: it borrows from both homes, puts, and is killed the moment its put is done."""
    node = Node("child", ("shm", "tcp"), False)
    await node.start([])
    for name, port in zip(HOMES, ports, strict=True):
        node.channel.introduce(name, ("127.0.0.1", int(port)))
    client = Client(node)
    await client.borrow()
    done = client.put_now([1, 2, 3])
    assert done == {1, 2, 3} and client.asked == []
    os.kill(os.getpid(), signal.SIGKILL)


async def test_what_a_killed_process_has_put_stays_and_its_slots_return(pool):
    ports = [str(home.channel.links.address[1]) for home in pool.homes.values()]
    code = (
        "import asyncio, sys; from tests.cache.quick.test_lent_slots import killed; asyncio.run(killed(*sys.argv[1:]))"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *ports, cwd=PROJECT)
    assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
    async with asyncio.timeout(20):
        while any(len(home.lending._loans) > 1 or home.lending._returning for home in pool.homes.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [pool.homes[home_of(i)].local.contains(key_of(i)) for i in (1, 2, 3)] == ["dram"] * 3
    assert await pool.far.store.get_many([key_of(i) for i in (1, 2, 3)]) == [block_of(i) for i in (1, 2, 3)]


async def test_no_slots_are_lent_where_tenants_have_quotas(pool, monkeypatch):
    monkeypatch.setattr(LocalStore, "has_quotas", True)
    home = Node("quota", ("shm", "tcp"), True)
    await home.start([pool.node])
    assert home.lending._rows is None
    assert await pool.node.store._calls.lend("quota") == -1
    await home.close()
