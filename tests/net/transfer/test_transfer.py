"""The transfer engine against nodes in other processes: what arrives, what is refused, and which path is taken."""

import asyncio
import zlib

import pytest

from net.channel.channel import Channel, RemoteError
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine, TransferError
from tests.net.pairs import MIB, SIZE, both, crc, neighbours, pair
from tests.net.peers import open_fds


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
        ({"path": "/nowhere/shm"}, "unreachable"),
        ({"token": "wrong"}, "another process"),
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


@pytest.mark.parametrize("change", [{"offers": 5}, {"offers": {"tcp": None}}, {"epoch": None}, {"more": 1}], ids=str)
async def test_an_offer_that_is_not_as_agreed_is_none(change, monkeypatch):
    async with pair() as (channel, engine, _, _):
        call = channel.call

        async def changed(peer_id, kind, body, timeout_s):
            answer, data = await call(peer_id, kind, body, timeout_s=timeout_s)
            return answer | change, data

        monkeypatch.setattr(channel, "call", changed)
        with pytest.raises(TransferError, match="take part in transfers: the answer does not have the expected form"):
            await engine.open("b")
        monkeypatch.undo()
        with pytest.raises(RemoteError) as caught:
            await channel.call("b", "transfer.open", {"now": True})
        assert caught.value.code == "bad_request"


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
        with pytest.raises(ValueError, match="already registered"):
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
