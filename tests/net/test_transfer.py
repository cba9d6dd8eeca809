"""The transfer engine against nodes in other processes, over both transports."""

import asyncio
import json
import signal
import zlib
from contextlib import asynccontextmanager

import pytest

from net.channel import Channel, PeerLost, RemoteError
from net.memory import Region
from net.transfer import Op, TransferEngine, TransferError
from tests.net.peers import child, open_fds, settled_fds, until

MIB = 1 << 20
SIZE = 32 * MIB


@asynccontextmanager
async def pair(order="shm,tcp", theirs="shm,tcp"):
    """(channel, engine, region 'ours') of node 'a' here, and the process of node 'b'."""
    channel = Channel("a", {})
    engine = TransferEngine(channel, order.split(","))
    await channel.start("127.0.0.1")
    with Region.shared("ours", SIZE) as region:
        engine.register(region)
        async with child("node.py", "b", theirs, str(SIZE)) as process:
            channel.introduce("b", tuple(json.loads(await process.stdout.readline())))
            yield channel, engine, region, process
            await engine.close()
            await channel.close()


async def crc(channel, offset, nbytes, name="theirs"):
    return (await channel.call("b", "crc", {"name": name, "offset": offset, "nbytes": nbytes}))[0]["crc"]


both = pytest.mark.parametrize("order", ["shm", "tcp"])


@both
@pytest.mark.parametrize("nbytes", [1, 4096, 368 * 1024, MIB, 20 * MIB + 3])
async def test_read_and_write_one_span(order, nbytes):
    async with pair(order) as (channel, engine, region, _):
        done = await engine.submit("b", Op.READ, "ours", "theirs", [(7, 256, nbytes)])
        assert (done.nbytes, done.transport) == (nbytes, order)
        pattern = bytes(range(256))
        assert zlib.crc32(region.memory[7 : 7 + nbytes]) == zlib.crc32((pattern * (nbytes // 256 + 1))[:nbytes])
        assert not any(region.memory[:7])
        assert not any(region.memory[7 + nbytes : 7 + nbytes + 64])
        region.memory[MIB : MIB + nbytes] = pattern[::-1] * (nbytes // 256) + pattern[::-1][: nbytes % 256]
        await engine.submit("b", Op.WRITE, "ours", "theirs", [(MIB, 3, nbytes)])
        assert await crc(channel, 3, nbytes) == zlib.crc32(region.memory[MIB : MIB + nbytes])
        assert await crc(channel, 3 + nbytes, 1) == zlib.crc32(pattern[(3 + nbytes) % 256 :][:1])


@both
async def test_hundreds_of_scattered_spans_are_one_submission(order):
    async with pair(order) as (channel, engine, region, _):
        length, count = 12 << 10, 500
        region.memory[:] = bytes(i * 7 % 251 for i in range(SIZE // 1024)) * 1024
        spans = [(i * 2 * length, (count - 1 - i) * length, length) for i in range(count)]
        await engine.submit("b", Op.WRITE, "ours", "theirs", spans)
        expected = b"".join(region.memory[at : at + length] for at, _, _ in reversed(spans))
        assert await crc(channel, 0, count * length) == zlib.crc32(expected)
        back = [(SIZE // 2 + remote, remote, length) for _, remote, length in spans]
        await engine.submit("b", Op.READ, "ours", "theirs", back)
        assert zlib.crc32(region.memory[SIZE // 2 :][: count * length]) == zlib.crc32(expected)


@both
async def test_many_transfers_at_once_and_both_ways(order):
    async with pair(order, order) as (channel, engine, region, _):
        region.memory[: 8 * MIB] = bytes(range(256)) * (8 * MIB // 256)
        reads = [engine.submit("b", Op.READ, "ours", "theirs", [((8 + i) * MIB, i * MIB, MIB)]) for i in range(8)]
        writes = [engine.submit("b", Op.WRITE, "ours", "theirs", [(i * MIB, (16 + i) * MIB, MIB)]) for i in range(8)]
        body = {"op": "read", "remote": "ours", "spans": [[30 * MIB, 0, 2 * MIB]], "timeout_s": 10}
        order_back = channel.call("b", "submit", body)
        answers = await asyncio.gather(*reads, *writes, order_back)
        assert answers[-1][0] == {"nbytes": 2 * MIB, "transport": order}
        pattern = zlib.crc32(bytes(range(256)) * (8 * MIB // 256))
        assert zlib.crc32(region.memory[8 * MIB : 16 * MIB]) == pattern
        assert await crc(channel, 16 * MIB, 8 * MIB) == pattern


async def test_the_path_says_which_transport_and_why_not_the_better_one():
    async with pair() as (_, engine, _, _):
        assert engine.path_of("b") is None
        path = await engine.open("b")
        assert (path.transport, path.refused) == ("shm", {})
        assert engine.path_of("b") is path is await engine.open("b")
        assert (await engine.open("a")).transport == "local"
    async with pair(theirs="tcp") as (_, engine, _, _):
        path = await engine.open("b")
        assert (path.transport, path.refused) == ("tcp", {"shm": "the peer does not offer it"})
        assert path.why() == "TCP to 127.0.0.1, 2 connections; no shm: the peer does not offer it"
    async with pair(order="tcp") as (_, engine, _, _):
        path = await engine.open("b")
        assert (path.transport, path.refused) == ("tcp", {})
    async with pair(order="shm", theirs="tcp") as (_, engine, _, _):
        with pytest.raises(TransferError, match="no transport to 'b': shm: the peer does not offer it"):
            await engine.open("b")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot": "another"}, "another host"),
        ({"path": "/nowhere/shm"}, "out of reach"),
        ({"token": "wrong"}, "another one"),
        ({"refused": "it cannot offer its memory: no space"}, "no space"),
    ],
)
async def test_where_memory_cannot_be_shared_tcp_is_used_and_the_reason_kept(change, reason, monkeypatch):
    async with pair() as (channel, engine, _, _):
        call = channel.call

        async def changed(peer_id, kind, body, timeout_s):
            answer, data = await call(peer_id, kind, body, timeout_s=timeout_s)
            answer["offers"]["shm"].update(change)
            return answer, data

        monkeypatch.setattr(channel, "call", changed)
        path = await engine.open("b")
        assert path.transport == "tcp"
        assert reason in path.refused["shm"]
        assert (await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, 10)])).transport == "tcp"


@both
async def test_bounds_and_names_are_checked_on_both_sides(order):
    async with pair(order) as (_, engine, region, _):
        for op in Op:
            with pytest.raises(TransferError, match="outside region 'theirs'"):
                await engine.submit("b", op, "ours", "theirs", [(0, SIZE - 5, 6)])
            with pytest.raises(TransferError, match="outside region 'ours'"):
                await engine.submit("b", op, "ours", "theirs", [(SIZE - 5, 0, 6)])
            with pytest.raises(TransferError, match="'nothing' is not registered there"):
                await engine.submit("b", op, "ours", "nothing", [(0, 0, 2 * MIB)])
            with pytest.raises(TransferError, match="'nothing' is not registered here"):
                await engine.submit("b", op, "nothing", "theirs", [(0, 0, 6)])
            assert (await engine.submit("b", op, "ours", "theirs", [])).nbytes == 0
        assert not any(region.memory[:4096])
        await engine.submit("b", Op.READ, "ours", "theirs", [(0, SIZE - 5, 5)])
        assert engine.snapshot()[0]["failures"] == 8


@both
async def test_regions_come_and_go_while_connected(order):
    async with pair(order) as (channel, engine, region, _):
        await engine.open("b")
        for value in (1, 2, 3):
            body = {"name": "late", "nbytes": 64 + value, "value": value, "shared": True}
            await channel.call("b", "register", body)
            await engine.submit("b", Op.READ, "ours", "late", [(0, 0, 64 + value)])
            assert bytes(region.memory[: 64 + value]) == bytes([value]) * (64 + value)
            await channel.call("b", "unregister", {"name": "late"})
            with pytest.raises(TransferError, match="not registered there"):
                await engine.submit("b", Op.READ, "ours", "late", [(0, 0, 64)])
        with pytest.raises(ValueError, match="registered already"):
            engine.register(region)


async def test_private_memory_needs_tcp():
    async with pair("shm") as (channel, engine, _, _):
        await channel.call("b", "register", {"name": "hidden", "nbytes": 64, "value": 1, "shared": False})
        with pytest.raises(TransferError, match=r"Region\.shared, or use the transport tcp"):
            await engine.submit("b", Op.READ, "ours", "hidden", [(0, 0, 64)])
    async with pair("tcp") as (channel, engine, region, _):
        await channel.call("b", "register", {"name": "hidden", "nbytes": 64, "value": 1, "shared": False})
        await engine.submit("b", Op.READ, "ours", "hidden", [(0, 0, 64)])
        assert region.memory[63] == 1


async def test_a_node_moves_bytes_to_itself():
    channel = Channel("a", {})
    engine = TransferEngine(channel)
    with Region.private("x", 4 * MIB) as x, Region.shared("y", 4 * MIB) as y:
        engine.register(x)
        engine.register(y)
        x.memory[:5] = b"hello"
        assert (await engine.submit("a", Op.WRITE, "x", "y", [(0, 100, 5)])).transport == "local"
        assert bytes(y.memory[100:105]) == b"hello"
        y.memory[MIB:] = b"z" * (3 * MIB)
        await engine.submit("a", Op.READ, "x", "y", [(MIB, MIB, 3 * MIB)])
        assert zlib.crc32(x.memory[MIB:]) == zlib.crc32(y.memory[MIB:])
        with pytest.raises(TransferError, match="outside region 'y'"):
            await engine.submit("a", Op.READ, "x", "y", [(0, 4 * MIB, 1)])
        await engine.close()
        await channel.close()


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
    """The writer is alive and keeps writing; once fenced, the memory holds still until it connects anew."""
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
    monkeypatch.setattr("net.tcp_rail.CANCEL_S", 0.2)
    lost = []
    async with pair("tcp") as (channel, engine, _, process):
        channel.on_lost(lost.append)
        await engine.open("b")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
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


async def test_snapshot_and_closed_engine():
    async with pair() as (channel, engine, _, _):
        await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, MIB)])
        await engine.submit("b", Op.WRITE, "ours", "theirs", [(0, 0, 10)])
        (row,) = engine.snapshot()
        assert (row["peer"], row["transport"], row["bytes_read"], row["bytes_written"]) == ("b", "shm", MIB, 10)
        assert row["failures"] == 0
        assert row["gb_per_s"] > 0
        await engine.close()
        with pytest.raises(TransferError, match="closed"):
            await engine.submit("b", Op.READ, "ours", "theirs", [(0, 0, MIB)])
        body = {"op": "read", "remote": "ours", "spans": [[0, 0, 1]], "timeout_s": 5}
        with pytest.raises(RemoteError):
            await channel.call("b", "submit", body)
    with pytest.raises(ValueError, match="shm, rdma, tcp"):
        TransferEngine(Channel("x", {}), ["pigeon"])


@asynccontextmanager
async def neighbours(order):
    """Two nodes in this process: (engine, region) of 'a' and of 'b'."""
    sides, made = [], []
    for name in ("a", "b"):
        channel = Channel(name, {})
        engine = TransferEngine(channel, [order])
        region = Region.shared(f"of-{name}", SIZE)
        engine.register(region)
        made.append((channel, await channel.start("127.0.0.1"), engine, region))
        sides.append((engine, region))
    made[0][0].introduce("b", made[1][1])
    try:
        yield sides
    finally:
        for channel, _, engine, region in made:
            await engine.close()
            await channel.close()
            region.close()


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


async def test_a_node_that_cannot_offer_its_memory_says_why(tmp_path, monkeypatch):
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(far))
    before = open_fds()
    async with neighbours("shm") as ((a, _), _):
        with pytest.raises(TransferError, match=r"it cannot offer its memory: .*path too long"):
            await a.open("b")
    assert not list(far.iterdir())
    assert open_fds() <= before + 1


@both
async def test_a_path_is_found_once_however_many_ask(order):
    async with neighbours(order) as ((a, _), _):
        paths = await asyncio.gather(*(a.open("b") for _ in range(10)))
        assert len({id(path) for path in paths}) == 1
        connections = len(a._channel.links._everyone)  # the second for data comes when it comes
        assert connections in (2, 3) if order == "tcp" else connections == 1
