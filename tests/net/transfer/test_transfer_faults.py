"""Transfers under faults: over a transport that breaks by seed, and over real TCP. Afterwards the bytes are equal or
the error is clean, and in both cases nothing moves any more."""

import asyncio
import json
import random
import zlib
from contextlib import asynccontextmanager

import pytest

from net.channel.channel import Channel
from net.channel.connection import Connection
from net.transfer.common.memory import Region
from net.transfer.engine import URGENT, Op, PeerLost, TransferEngine, TransferError, transports
from net.transfer.shm import transport as shm_transport
from tests.net.fake_transport import Fabric, Fake, Faults
from tests.net.peers import child, until

KIB, MIB = 1 << 10, 1 << 20
SIZE = 8 * MIB

HARSH = Faults(drop=0.2, duplicate=0.2, delay_s=0.003, slow_rail_s=0.004)


@asynccontextmanager
async def two(order, options=None, nbytes=SIZE):
    """Nodes 'a' and 'b' in this process: [(channel, engine, region 'of-a')], [... 'of-b']."""
    made = []
    for name in ("a", "b"):
        channel = Channel(name, {})
        engine = TransferEngine(channel, [order], options)
        region = Region.shared(f"of-{name}", nbytes)
        engine.register(region)
        made.append((channel, engine, region, await channel.start("127.0.0.1")))
    made[0][0].introduce("b", made[1][3])
    try:
        yield [side[:3] for side in made]
    finally:
        for channel, engine, region, _ in made:
            await engine.close()
            await channel.close()
            region.close()


@asynccontextmanager
async def faulty(monkeypatch, seed, faults):
    monkeypatch.setitem(transports, "fake", Fake)
    fabric = Fabric(seed, faults)
    async with two("fake", {"fake": {"fabric": fabric}}) as sides:
        yield fabric, sides


def scattered(rng, nbytes=SIZE, count=40):
    """Spans whose sides do not overlap."""
    cell = nbytes // count
    theirs = rng.sample(range(count), count)
    lengths = [rng.randrange(1, cell) for _ in range(count)]
    return [(i * cell, theirs[i] * cell, lengths[i]) for i in range(count)]


def fill(region, seed):
    region.memory[:] = random.Random(seed).randbytes(len(region.memory))


def equal(ours, theirs, spans):
    return all(ours.memory[a : a + n] == theirs.memory[b : b + n] for a, b, n in spans)


async def still(*regions):
    """Nothing moves any more."""
    before = [zlib.crc32(region.memory) for region in regions]
    await asyncio.sleep(0.02)
    assert [zlib.crc32(region.memory) for region in regions] == before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", list(Op))
async def test_lost_late_doubled_and_overtaking_slices_change_nothing(monkeypatch, seed, op):
    async with faulty(monkeypatch, seed, HARSH) as (fabric, ((_, a, ours), (_, _, theirs))):
        fill(ours, seed)
        fill(theirs, seed + 100)
        spans = scattered(random.Random(seed))
        await a.submit("b", op, "of-a", "of-b", spans)
        assert equal(ours, theirs, spans)
        assert fabric.resent > 0 < fabric.duplicated, "the faults did happen"
        (row,) = a.snapshot()
        assert row["retries"] == fabric.resent
        assert sum(row["latencies"]) == 1
        assert all(rail["bytes"] > 0 for rail in row["rails"]), "the slow one, too"
        await still(ours, theirs)


async def test_a_slice_that_never_arrives_is_an_error(monkeypatch):
    async with faulty(monkeypatch, 1, Faults(drop=1.0)) as (_, ((_, a, _), _)):
        with pytest.raises(TransferError, match="dropped 20 times"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, MIB)])
        assert a.snapshot()[0]["failures"] == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_cut_ends_in_peer_lost_and_the_fence_holds(monkeypatch, seed):
    faults = Faults(delay_s=0.002, duplicate=0.5, cut_after=60 + seed)
    async with faulty(monkeypatch, seed, faults) as (_, ((channel, a, ours), (_, b, theirs))):
        lost = []
        channel.on_lost(lost.append)
        with pytest.raises(PeerLost):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert lost == ["b"]
        await b.fence("a")
        await still(ours, theirs)
        faults.cut_after = None
        fill(ours, seed)
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert equal(ours, theirs, [(0, 0, SIZE)])


async def test_a_write_while_a_lost_path_is_found_again_waits_for_the_new_epoch(monkeypatch):
    """The peer has fenced this node and may use the memory for others: an earlier grant must move nothing, also while
    the new path is half open."""
    async with two("shm", nbytes=MIB) as ((channel, a, _), (_, b, theirs)):
        fill(theirs, 1)
        await a.open("b")
        granted, before = b.epoch_of("a"), bytes(theirs.memory)
        channel.drop("b", "test")
        await until(lambda: b.epoch_of("a") != granted)
        await b.fence("a")
        late = []

        def prove(self, message, before=shm_transport._Attached._prove):
            before(self, message)
            late.append(asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 4096)], epoch=granted)))

        monkeypatch.setattr(shm_transport._Attached, "_prove", prove)
        await a.open("b")
        (found,) = await asyncio.gather(*late, return_exceptions=True)
        assert isinstance(found, TransferError) and "lost this node after it granted" in str(found)
        assert bytes(theirs.memory) == before


async def test_transfers_while_a_lost_path_is_found_again_do_not_lose_it_again():
    """The owner of shared memory takes a question before the proof for that of a stranger, and hangs up."""
    async with two("shm", nbytes=MIB) as ((channel, a, _), _):
        lost = []
        channel.on_lost(lost.append)
        await a.open("b")
        channel.drop("b", "test")
        moves = []
        for _ in range(40):
            moves.append(asyncio.create_task(a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, 4096)])))
            await asyncio.sleep(0)
        found = await asyncio.gather(*moves, return_exceptions=True)
        assert {type(one).__name__ for one in found} == {"Completion"} and lost == ["b"]


async def test_a_region_is_refused_to_all_peers_although_one_is_just_being_lost(monkeypatch):
    """Its connection is closing, and the event loop has not said so yet."""
    async with two("tcp", nbytes=32 * MIB) as ((_, a, _), (_, b, _)):
        await a.open("b")
        reads = [asyncio.create_task(a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, 32 * MIB)], 5.0)) for _ in range(4)]
        served = b._transports["tcp"]._served
        await until(lambda: any(one._reads for one in served))

        def send(self, message, *parts, before=Connection.send):
            if message.get("op") == "fail":
                raise PeerLost("closing")
            return before(self, message, *parts)

        monkeypatch.setattr(Connection, "send", send)
        b.unregister("of-b")
        assert not any(one._reads for one in served) and "of-b" not in b.regions()
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize("transport", ["fake", "tcp"])
@pytest.mark.parametrize("op", list(Op))
async def test_deadlines_and_cancels_at_any_moment(monkeypatch, transport, op):
    monkeypatch.setitem(transports, "fake", Fake)
    rng = random.Random(7)
    options = {"fake": {"fabric": Fabric(7, Faults(delay_s=0.002, drop=0.1))}} if transport == "fake" else None
    ended = set()
    async with two(transport, options) as ((_, a, ours), (_, _, theirs)):
        await a.open("b")
        for round_ in range(16):
            fill(ours, round_)
            late_s = rng.random() * 0.006 if round_ else 0.0  # one is late on any machine
            call = a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)], timeout_s=late_s)
            task = asyncio.create_task(call)
            if round_ % 2:
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            ended.add(type(result).__name__)
            if round_ % 4 == 0:
                await still(ours, theirs)
        assert ended <= {"TimeoutError", "CancelledError", "Completion"}
        assert "TimeoutError" in ended
        fill(ours, 99)
        await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert equal(ours, theirs, [(0, 0, SIZE)])


async def test_a_deadline_leaves_no_request_to_cancel_behind():
    async with two("tcp") as ((_, a, _), _):
        await a.open("b")
        with pytest.raises(TimeoutError):
            await a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, SIZE)], timeout_s=0.0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        async with asyncio.timeout(60):
            await a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, SIZE)])


async def test_a_sender_killed_in_the_middle_of_its_push_is_fenced():
    async with two("tcp", nbytes=32 * MIB) as ((channel, engine, region), _):
        lost = []
        channel.on_lost(lost.append)
        async with child("node.py", "c", "tcp", str(32 * MIB)) as process:
            channel.introduce("c", tuple(json.loads(await process.stdout.readline())))
            body = {"op": "write", "remote": "of-a", "spans": [[0, 0, 32 * MIB]], "timeout_s": 20}
            await channel.call("c", "crc", {"name": "theirs", "offset": 0, "nbytes": 1})
            channel.post("c", "repeat", body)
            await until(lambda: any(region.memory[i * MIB + 1] for i in range(32)))
            process.kill()
            await until(lambda: lost == ["c"])
        await engine.fence("c")
        region.memory[:] = bytes(len(region.memory))
        await asyncio.sleep(0.05)
        assert not any(region.memory[1::4096])


@pytest.mark.parametrize("op", list(Op))
async def test_an_urgent_transfer_does_not_wait_behind_bulk(op):
    """Bulk is stuck, as behind a slow reader: its connection is not read from on either side."""
    async with two("tcp", nbytes=32 * MIB) as ((_, a, ours), (_, b, theirs)):
        await a.submit("b", op, "of-a", "of-b", [(0, 0, KIB)])
        ends = [rail.connection for rail in a._transports["tcp"]._bundles["b", "data"].connections()]
        ends += [served.connection for served in b._transports["tcp"]._served]
        for end in ends:
            end._transport.pause_reading()
        bulk = asyncio.create_task(a.submit("b", op, "of-a", "of-b", [(0, 0, 32 * MIB)]))
        await asyncio.sleep(0.01)
        fill(ours, 3)
        await a.submit("b", op, "of-a", "of-b", [(MIB, 5 * MIB, 300 * KIB)], timeout_s=60, priority=URGENT)
        assert equal(ours, theirs, [(MIB, 5 * MIB, 300 * KIB)])
        assert not bulk.done()
        for end in ends:
            end._transport.resume_reading()
        await bulk


async def test_an_urgent_copy_does_not_wait_for_the_copying_threads():
    async with two("shm", nbytes=32 * MIB) as ((_, a, ours), (_, _, theirs)):
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, KIB)])
        copier = a._transports["shm"]._copier
        hold = asyncio.Event()
        loop = asyncio.get_running_loop()
        occupied = [
            copier._pool.submit(lambda: asyncio.run_coroutine_threadsafe(hold.wait(), loop).result())
            for _ in range(copier._workers)
        ]
        bulk = asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 16 * MIB)]))
        fill(ours, 4)
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(16 * MIB, 16 * MIB, 12 * MIB)], priority=URGENT)
        assert equal(ours, theirs, [(16 * MIB, 16 * MIB, 12 * MIB)])
        assert not bulk.done()
        hold.set()
        await bulk
        assert all(one.result() for one in occupied)
