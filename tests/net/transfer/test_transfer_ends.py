"""Transfers whose peer is killed, frozen, restarted or closed, and those that are cancelled, over both transports."""

import asyncio
import json
import signal
import threading
import zlib

import pytest

from net.channel.channel import Channel, PeerLost
from net.loop.clock import Clock
from net.transfer.common.memory import Region
from net.transfer.common.traffic import RailLimit
from net.transfer.engine import Op, TransferEngine, TransferError
from tests.net.pairs import MIB, SIZE, both, crc, neighbours, pair
from tests.net.peers import child, open_fds, settled_fds, until


@both
@pytest.mark.parametrize("op", list(Op))
async def test_a_killed_peer_ends_transfers_with_peer_lost(order, op):
    lost = []
    async with pair(order) as (channel, engine, _, process):
        channel.on_lost(lost.append)
        await engine.open("b")

        async def stream():
            while True:
                await engine.submit("b", op, "ours", "theirs", [(0, 0, SIZE)], timeout_s=20)

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        await until(lambda: engine.snapshot()[0]["bytes_read"] + engine.snapshot()[0]["bytes_written"] > 0)
        process.kill()
        for one in streams:
            with pytest.raises(PeerLost):
                await one
        await until(lambda: lost == ["b"])
        assert engine.path_of("b") is None
        with pytest.raises(PeerLost):
            await engine.submit("b", op, "ours", "theirs", [(0, 0, 10)])


@both
async def test_fence_ends_the_writes_of_a_lost_peer(order):
    """The writer is alive and keeps writing; once fenced, the memory holds still until it connects again."""
    async with pair("shm,tcp", order) as (channel, engine, region, _):
        await channel.call("b", "crc", {"name": "theirs", "offset": 0, "nbytes": 1})
        body = {"op": "write", "remote": "ours", "spans": [[0, 0, SIZE]], "timeout_s": 20}
        channel.post("b", "repeat", body)
        await until(lambda: region.memory[SIZE - 1] == 255)
        region.memory[:] = bytes(SIZE)
        await until(lambda: any(region.memory[i * MIB + 1] for i in range(32)))
        # it stays cut off: from now on nobody is let in
        channel.links._check = lambda hello: "the test has lost it"
        channel.drop("b", "the test says so")
        await engine.fence("b")
        region.memory[:] = bytes(SIZE)
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert not any(region.memory[i * 4096 + 1] for i in range(SIZE // 4096))


@both
@pytest.mark.parametrize("op", list(Op))
async def test_a_cancelled_transfer_moves_nothing_afterwards(order, op):
    async with pair(order) as (channel, engine, region, _):
        await engine.open("b")
        for delay in (0, 0.001, 0.002, 0.004):
            region.memory[:] = b"\xaa" * SIZE
            task = asyncio.create_task(engine.submit("b", op, "ours", "theirs", [(0, 0, SIZE)]))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            if op is Op.READ:
                first = zlib.crc32(region.memory)
                await asyncio.sleep(0.02)
                assert zlib.crc32(region.memory) == first
            else:
                first = await crc(channel, 0, SIZE)
                await asyncio.sleep(0.02)
                assert await crc(channel, 0, SIZE) == first
        assert engine.path_of("b") is not None, "the others on this path are not disturbed"
        await engine.submit("b", op, "ours", "theirs", [(0, 0, SIZE)])


async def test_a_frozen_peer_costs_the_deadline_and_no_more(monkeypatch):
    monkeypatch.setattr("net.transfer.tcp.rail.CANCEL_S", 0.2)
    lost = []
    async with pair("tcp") as (channel, engine, _, process):
        channel.on_lost(lost.append)
        await engine.open("b")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"did not finish within 0\.1 s"):
            await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, SIZE)], timeout_s=0.1)
        assert not lost
        with pytest.raises(PeerLost):
            await engine.submit("b", Op.WRITE, "ours", "theirs", [(0, 0, SIZE)], timeout_s=0.1)
        assert lost == ["b"], "it did not confirm that the write has stopped"


async def test_shared_memory_does_not_need_the_other_side():
    async with pair("shm") as (_, engine, region, process):
        await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, 1)])
        process.send_signal(signal.SIGSTOP)
        await engine.submit("b", Op.READ, "ours", "theirs", [(0, 256, 4 * MIB)])
        assert region.memory[255] == 255
        process.send_signal(signal.SIGCONT)


async def test_control_messages_do_not_wait_behind_bulk():
    """A reader that has stopped: megabytes are stuck on the data connection, calls still work."""
    async with pair("tcp") as (channel, engine, _, _):
        await engine.open("b")
        rail = engine._transports["tcp"]._bundles["b", "data"].connections()[0].connection
        rail._transport.pause_reading()
        task = asyncio.create_task(engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, SIZE)], timeout_s=20))
        for _ in range(20):
            await crc(channel, 0, 1)
        assert not task.done()
        rail._transport.resume_reading()
        await task


@both
async def test_a_restarted_peer_is_reached_again(order):
    channel = Channel("a", {})
    engine = TransferEngine(channel, [order])
    await channel.start("127.0.0.1")
    with Region.shared("ours", MIB) as region:
        engine.register(region)
        for life in range(3):
            async with child("node.py", "b", order, str(MIB)) as process:
                channel.introduce("b", tuple(json.loads(await process.stdout.readline())))
                await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, MIB)])
                assert region.memory[255] == 255
                region.memory[255] = 0
                if life == 0:
                    process.kill()
                else:
                    process.stdin.close()
                    assert await process.wait() == 0
                await until(lambda: engine.path_of("b") is None)
        await engine.close()
        await channel.close()


@both
async def test_an_orderly_end_of_the_peer_is_no_loss(order):
    lost = []
    async with pair(order) as (channel, engine, _, process):
        channel.on_lost(lost.append)
        await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, 10)])
        process.stdin.close()
        assert await process.wait() == 0
        await until(lambda: engine.path_of("b") is None)
        with pytest.raises(PeerLost):
            await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, 10)])
        assert not lost


@both
async def test_nothing_is_left_open(order):
    for round_ in range(3):
        async with pair(order, order) as (channel, engine, _, process):
            await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, 2 * MIB)])
            body = {"op": "read", "remote": "ours", "spans": [[0, 0, 2 * MIB]], "timeout_s": 10}
            await channel.call("b", "submit", body)
            if round_ == 1:
                process.kill()
                await process.wait()
        if round_ == 0:
            await asyncio.sleep(0.1)
            before = open_fds()
    await settled_fds(before)


async def test_unregistering_ends_what_is_under_way():
    async with neighbours("tcp") as ((a, _), (b, theirs)):
        await a.open("b")
        tasks = [asyncio.create_task(a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])) for op in Op]
        served = b._transports["tcp"]._served
        await until(lambda: any(one._writes for one in served) and any(one._reads for one in served))
        b.unregister("of-b")
        for task in tasks:
            with pytest.raises(TransferError, match=r"was unregistered|not registered there"):  # begun, or not yet
                await task
        theirs.memory[:] = bytes(SIZE)
        await a.fence("b")
        assert not any(theirs.memory[::4096])


async def test_closing_the_engine_ends_transfers_but_not_the_channel():
    async with neighbours("tcp") as ((a, _), (b, _)):
        await a.open("b")
        task = asyncio.create_task(a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, SIZE)]))
        await asyncio.sleep(0)
        await b.close()
        with pytest.raises(PeerLost):
            await task
        with pytest.raises(TransferError, match="does not take part in transfers: its transfer engine is closed"):
            await a.open("b")


@pytest.mark.parametrize("mapped", [False, True], ids=["unmapped with the loss", "kept mapped by another reader"])
async def test_a_write_whose_peer_is_lost_while_its_pages_are_mapped_ends_in_peer_lost(monkeypatch, mapped):
    """The fence does not wait for it, so it must not write any more."""
    begun, go_on = threading.Event(), threading.Event()

    def populate(*_):
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr("net.transfer.shm.transport._populate", populate)
    async with neighbours("shm") as ((a, ours), (b, theirs)):
        ours.memory[:] = b"\xff" * SIZE
        path = await a.open("b")
        task = asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 16 * MIB)]))
        await until(begun.is_set)
        attached = a._transports["shm"]._attached["b"]
        view = attached.regions["of-b"].memory[:] if mapped else None
        b._channel.drop("a", "the test says so")
        await until(lambda: not a._transports[path.transport].is_open("b"))
        await b.fence("a")
        go_on.set()
        with pytest.raises(PeerLost):
            await task
        assert not any(theirs.memory[::4096])
        del view


@both
async def test_a_region_that_goes_while_its_submission_waits_for_a_path_is_an_error(order):
    async with neighbours(order) as ((a, _), _):
        with Region.shared("short", MIB) as short:
            a.register(short)
            task = asyncio.create_task(a.submit("b", Op.READ, "short", "of-b", [(0, 0, 10)]))
            await asyncio.sleep(0)
            assert not task.done()
            a.unregister("short")
        with pytest.raises(TransferError, match="not registered here"):
            await task


@both
async def test_who_does_not_know_of_its_loss_gets_no_way_in_before_it_has_heard_of_it(order):
    """b has given a up, and a has not been told: as when the network was cut meanwhile."""
    async with neighbours(order) as ((a, ours), (b, theirs)):
        ours.memory[:] = b"\xff" * SIZE
        epoch = b.epoch_of("a")
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 1)], epoch=epoch)
        assert theirs.memory[0] == 255
        for transport in b._transports.values():  # what `b` does at a loss, less what `a` would hear
            transport.drop("a")
        b._finder.lost("a")
        await b.fence("a")
        theirs.memory[0] = 0
        with pytest.raises((ConnectionError, TransferError)):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 1)], epoch=epoch)
        with pytest.raises(TransferError, match="lost this node after it granted access to the memory"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 1)], epoch=epoch)
        assert theirs.memory[0] == 0
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, 1)], epoch=b.epoch_of("a"))
        assert theirs.memory[0] == 255


@both
async def test_a_submission_that_waits_past_a_loss_of_its_peer_moves_nothing(order):
    """The peer has fenced this node and given the memory to others; that both have found each other again makes the
    old spans no better."""
    async with neighbours(order) as [(a, _), (b, _)]:
        await a.open("b")
        a._limit = RailLimit(1e12)

        class Meanwhile(Clock):
            async def until(self, moment):
                a._limit = None
                a._channel.drop("b", "the test says so")
                await until(lambda: a.path_of("b") is None and b.path_of("a") is None)
                await a.submit("b", Op.READ, "of-a", "of-b", [(0, 0, 8)])

        a._clock = Meanwhile()
        with pytest.raises(PeerLost, match="before a transfer began"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, MIB)])
