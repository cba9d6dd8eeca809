"""Gets and puts over data connections: one question each, blocks from slot to destination, checked on their way."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from cache.arena import Arena
from cache.homes.rendezvous import equal_members
from cache.offer import PLAIN_OFFER
from cache.protocol import Deadlines
from cache.server import bulk_answers
from cache.ssd import SsdTier
from cache.store.bulk_get import BulkGet
from cache.store.bulk_put import BulkPut
from cache.store.job import StoreCall
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from net.bodies import encode
from net.channel.channel import Channel
from net.channel.cluster_key import ClusterKey
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

ROOT = b"r" * 16
QUICK = Deadlines(lookup_s=0.1, control_s=0.1, transfer_s=1e4, room_s=0.05, shun_s=0.01)
PATIENT = Deadlines(lookup_s=1e4, control_s=1e4, transfer_s=1e4, room_s=1e4)


def key_of(i):
    return random.Random(i).randbytes(16)


class Pool:
    """A client 'client' and homes over TCP in this process; blocks of `size` bytes, `slots` of them at each home."""

    def __init__(self, size, slots, deadlines, key):
        self.key = key
        self.size, self.slots, self.deadlines = size, slots, deadlines
        self.members, self.closing, self.locals, self.transfers, self.channels = [], [], {}, {}, {}

    def block(self, i):
        return random.Random(1000 + i).randbytes(self.size)

    async def add(self, name, directory=None, **options):
        channel = self.channels[name] = Channel(name, {}, cluster_key=self.key)
        transfer = self.transfers[name] = TransferEngine(channel, ["tcp"])
        local = None
        if name != "client":
            arena = Region.shared(f"{name}-dram", self.slots * self.size)
            ssd = SsdTier(directory, self.size, 64 * self.size, ROOT) if directory is not None else None
            local = self.locals[name] = LocalStore(Arena(arena, self.size), ssd)
            self.members.append(name)
            self.closing.append(arena)
        store = Store(
            name,
            channel,
            transfer,
            local,
            lambda: equal_members(self.members),
            StoreOptions(block_bytes=self.size, deadlines=self.deadlines, **options),
        )
        address = await channel.start("127.0.0.1")
        for other, theirs in self.channels.items():
            if other != name:
                theirs.introduce(name, address)
                channel.introduce(other, theirs.links.address)
        self.closing += [store, channel, transfer]
        return store

    async def close(self):
        for one in reversed(self.closing):
            if (end := one.close()) is not None:
                await end
        for local in self.locals.values():
            local.check_integrity()
            assert not local.stats()["dram"]["held"] and not local.stats()["dram"]["reserved"]


@asynccontextmanager
async def pool(size, slots=16, names=("client", "a"), deadlines=PATIENT, directory=None, key=None, **options):
    made = Pool(size, slots, deadlines, key)
    try:
        for name in names:
            where = directory if name != "client" else None
            setattr(made, name, await made.add(name, directory=where, **options))
        made.kv = Region.private("kv", 32 * size)
        made.client.attach(made.kv)
        made.closing.append(made.kv)
        yield made
    finally:
        await made.close()


async def put(made, numbers):
    for at, i in enumerate(numbers):
        made.kv.memory[at * made.size : (at + 1) * made.size] = made.block(i)
    offsets = [at * made.size for at in range(len(numbers))]
    return await made.client.put_from([key_of(i) for i in numbers], "kv", offsets)


async def get(made, numbers):
    made.kv.memory[:] = bytes(len(made.kv.memory))
    offsets = [at * made.size for at in reversed(range(len(numbers)))]
    result = await made.client.get_into([key_of(i) for i in numbers], "kv", offsets)
    for i, offset in list(zip(numbers, offsets, strict=True))[: result.blocks]:
        assert made.kv.memory[offset : offset + made.size] == made.block(i)
    return result


def damage(made, i, at, name="a"):
    local = made.locals[name]
    local.arena.memory(local._pool.lookup(key_of(i)))[at] ^= 1


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("size", [100, 4096, 100_000, 1_500_000])
async def test_blocks_of_every_size_in_calls_of_every_length(size):
    async with pool(size) as made:
        for numbers in ([0], [1, 2, 3], list(range(4, 12))):
            assert await put(made, numbers) == len(numbers)
            assert await put(made, numbers) == 0
            result = await get(made, numbers)
            assert (result.blocks, result.transports) == (len(numbers), {"tcp": len(numbers)})
        assert (await get(made, [*range(5, 12), 99, 4])).blocks == 7
        assert await made.client.get_many([key_of(99), key_of(3)]) == [None, made.block(3)]


async def test_nothing_is_asked_but_for_the_blocks():
    """One question per call: no pins, leases or commits."""
    async with pool(50_000) as made:
        asked = []
        call = made.channels["client"].call
        made.channels["client"].call = lambda peer, kind, *rest, **named: (
            asked.append(kind) or call(peer, kind, *rest, **named)
        )
        await put(made, [1, 2, 3])
        await get(made, [1, 2, 3])
        assert asked == ["transfer.open"]


async def test_sealed_with_the_cluster_key(tmp_path):
    secrets = tmp_path / "key"
    secrets.write_text("ab" * 32)
    secrets.chmod(0o600)
    async with pool(200_000, key=ClusterKey(secrets)) as made:
        await put(made, range(8))
        damage(made, 5, 9)
        assert (await get(made, range(8))).blocks == 5


async def test_values_shorter_than_their_slot():
    async with pool(60_000) as made:
        values = {key_of(i): made.block(i)[: 1 + 3989 * i] for i in range(12)}
        assert await made.client.put_many(list(values.items())) == [True] * 12
        assert await made.client.get_many(list(values)) == list(values.values())
        assert not await made.client.put(key_of(3), b"other")


@pytest.mark.parametrize("at", [0, 300_000, 1_499_999])
async def test_a_damaged_block_is_a_miss_and_is_dropped_at_its_home(at):
    async with pool(1_500_000) as made:
        await put(made, range(4))
        damage(made, 2, at)
        assert (await get(made, range(4))).blocks == 2
        assert made.client.stats()["corrupt"] == 1
        await until(lambda: made.locals["a"].contains(key_of(2)) is None)
        assert await put(made, range(4)) == 1
        assert (await get(made, range(4))).blocks == 4


async def test_without_checksums_nothing_is_compared():
    async with pool(5000, checksums=False) as made:
        await put(made, range(4))
        damage(made, 2, 17)
        await made.client.get_into([key_of(i) for i in range(4)], "kv", [0, 5000, 10_000, 15_000])
        assert made.kv.memory[10_000:15_000] != made.block(2)


async def test_what_the_home_has_is_not_sent_again():
    """But for the first piece of a call, which is not worth a question of its own."""
    async with pool(1_500_000) as made:
        await put(made, range(10))
        before = made.transfers["client"].snapshot()[0]["bytes_written"]
        assert await put(made, range(11)) == 1
        assert made.transfers["client"].snapshot()[0]["bytes_written"] - before == 3 * 1_500_000
        assert (await get(made, range(11))).blocks == 11


async def test_a_full_home_passes_on_what_it_has_no_room_for():
    async with pool(5000, slots=12, names=("client", "a", "b")) as made:
        blockers = [made.locals["a"].reservations.reserve(key_of(10**6 + i)) for i in range(10)]
        assert await put(made, range(12)) == 12
        assert (await get(made, range(12))).blocks == 12
        for slot in blockers:
            made.locals["a"].reservations.abandon(slot)


async def test_more_than_the_home_has_dram_for_comes_from_its_ssd(tmp_path):
    """The home has four slots; two pieces of two blocks each are asked for at once."""
    async with pool(1_500_000, slots=4, directory=tmp_path) as made:
        assert await put(made, range(20)) == 20
        await made.locals["a"].drain()
        result = await get(made, range(20))
        assert result.blocks == 20 and result.tiers["ssd"] >= 16


async def test_a_put_or_get_that_is_given_up_leaves_nothing():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # A home may have had all of a put that was given up: there is room for that, or the blocks read would make room.
    async with pool(600_000, slots=6 + 12 * 6) as made:
        await put(made, range(6))
        for round_ in range(24):
            numbers = [100 * round_ + i for i in range(6)] if round_ % 2 else list(range(6))
            working = asyncio.create_task((put if round_ % 2 else get)(made, numbers))
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            made.kv.memory[:] = bytes(len(made.kv.memory))  # it is ours again
        assert (await get(made, range(6))).blocks == 6
        assert made.client.stats()["corrupt"] == 0


@pytest.mark.parametrize(
    "tail",
    [{}, {"checksums": [1]}, {"checksums": ["1", "2"]}, {"checksums": [1, -2]}, {"checksums": None}, ["checksums"]],
)
async def test_a_put_whose_end_is_not_as_agreed_leaves_nothing(monkeypatch, tail):
    async with pool(50_000) as made:  # two are too many bytes for a put without an end
        monkeypatch.setattr(BulkPut, "tail", lambda call: tail)
        assert await put(made, range(2)) == 0
        assert made.locals["a"].stats()["dram"]["reserved"] == 0
        monkeypatch.undo()
        assert await put(made, range(2)) == 2


async def test_an_answer_that_broke_off_counts_for_nothing(monkeypatch):
    """Its connection breaks in the middle, and when the question comes again the home does not have it any more."""
    async with pool(3_000_000) as made:
        await put(made, [0])
        inherited, broken = BulkGet.received, []

        def break_off(call, moved):
            inherited(call, moved)
            if not broken and moved < made.size:
                made.locals["a"]._pool.forget(key_of(0))
                broken.extend(made.transfers["client"]._transports["tcp"]._bundles["a", "data"].connections())
                for rail in broken:
                    rail.connection._break("a test")

        monkeypatch.setattr(BulkGet, "received", break_off)
        assert (await get(made, [0])).blocks == 0
        assert broken


async def test_a_home_that_hangs_is_a_miss_after_its_deadline_and_found_again():
    """Not after the deadline of a whole transfer, which is hours here."""
    async with pool(5000, deadlines=QUICK) as made:
        await put(made, range(4))
        served = list(made.transfers["a"]._transports["tcp"]._served)
        for one in served:
            one.connection._transport.pause_reading()
        assert (await get(made, range(4))).blocks == 0
        assert await put(made, range(4, 8)) == 0
        for one in served:
            if not one.connection._transport.is_closing():
                one.connection._transport.resume_reading()
        async with asyncio.timeout(20):
            while (await get(made, range(4))).blocks < 4:
                pass


KEYS = b"".join(key_of(i) for i in range(2)).hex()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"keys": "zz"},
        {"keys": KEYS[:-2]},
        {"keys": KEYS, "lengths": [10_001, -1]},
        {"keys": KEYS, "lengths": [5000]},
        {"keys": KEYS, "offer": {"kept": [True]}},
        {"keys": KEYS, "offer": {"facts": [[1, 0.5, "batch"]]}},
        {"keys": KEYS, "offer": {"contents": {"checksums": [1], "lengths": [5000]}}},
        {"keys": KEYS, "checksums": [1]},
        {"keys": KEYS, "checksums": [1, -1]},
        {"keys": KEYS, "owner": "a"},
    ],
    ids=str,
)
async def test_a_put_that_is_not_as_agreed_is_refused_and_holds_nothing(body):
    async with pool(5000) as made:
        job = StoreCall([key_of(i) for i in range(2)], made.kv, [0, 5000], 5000)
        call = BulkPut(job, [0, 1], PLAIN_OFFER, True)
        call.body = body
        await made.client.put_many([(key_of(9), b"x")])
        with pytest.raises(RemoteError) as caught:
            await made.client._calls.ask("a", call)
        assert caught.value.code == "bad_request"
        assert made.locals["a"].stats()["dram"]["reserved"] == 0


@pytest.mark.parametrize("body", [{}, {"keys": 5}, {"keys": KEYS, "leading": 1}, {"keys": KEYS[:-2]}], ids=str)
async def test_a_get_that_is_not_as_agreed_is_refused(body):
    async with pool(5000) as made:
        await put(made, range(2))
        job = StoreCall([key_of(i) for i in range(2)], made.kv, [0, 5000], 5000)
        call = BulkGet(job, [0, 1], True, True)
        call.body = body
        with pytest.raises(RemoteError) as caught:
            await made.client._calls.ask("a", call)
        assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "change",
    [
        {"checksums": [1]},
        {"checksums": ["1", "2"]},
        {"lengths": [1, 9999]},
        {"tiers": ["ssd"]},
        {"hot": [[7, 2]]},
        {"slots": [0] * 3},
    ],
    ids=str,
)
async def test_an_answer_that_is_not_as_agreed_is_that_of_a_home_that_failed(monkeypatch, change):
    async with pool(5000) as made:
        await put(made, range(2))
        monkeypatch.setattr(bulk_answers, "encode", lambda got: encode(got) | change)
        assert (await get(made, range(2))).blocks == 0
        monkeypatch.undo()
        assert (await get(made, range(2))).blocks == 2
        await until(lambda: made.locals["a"].stats()["dram"]["held"] == 0)
