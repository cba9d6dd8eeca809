"""Several data connections to a peer: striping, connections cut in the middle, unread bytes of a cut one, slow ones."""

import asyncio
import random
import zlib
from contextlib import asynccontextmanager

import pytest

from net.transfer.common.memory import Region
from net.transfer.common.rails import Rail
from net.transfer.engine import Op, PeerLost, TransferEngine, TransferError
from tests.net.peers import channels, until

MIB = 1 << 20
SIZE = 6 * MIB


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr("net.transfer.tcp.bundle.SLICE_BYTES", MIB // 2)
    monkeypatch.setattr("net.transfer.common.rails.BACKOFF_S", 0.05)  # after the first slice that arrives


@asynccontextmanager
async def two(connections=2):
    """(channel, engine, region) of a and of b, over TCP."""
    async with channels("a", "b") as made:
        engines = [TransferEngine(one, ["tcp"], {"tcp": {"connections": connections}}) for one in made]
        regions = [Region.shared(f"of-{one.node_id}", SIZE) for one in made]
        for engine, region in zip(engines, regions, strict=True):
            engine.register(region)
        try:
            yield list(zip(made, engines, regions, strict=True))
        finally:
            for engine in engines:
                await engine.close()
            for region in regions:
                region.close()


def bundle(engine, peer="b"):
    return engine._transports["tcp"]._bundles[peer, "data"]


async def all_up(engine):
    await until(lambda: all(rail.up for rail in bundle(engine).rails))


def fill(region, seed):
    region.memory[:] = random.Random(seed).randbytes(MIB) * (len(region.memory) // MIB)


def same(ours, theirs):
    return zlib.crc32(ours.memory) == zlib.crc32(theirs.memory)


@pytest.mark.parametrize("op", list(Op))
async def test_a_large_transfer_uses_every_connection(op):
    async with two(3) as ((_, a, ours), (_, _, theirs)):
        fill(ours, 1)
        await a.open("b")
        await all_up(a)
        for _ in range(3):
            await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs)
        rows = a.snapshot()[0]["rails"]
        assert len(rows) == 3 and all(row["bytes"] > 0 for row in rows)
        assert sum(row["bytes"] for row in rows) == 3 * SIZE and not any(row["in_flight"] for row in rows)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("side", ["dialer", "acceptor", "both"])
async def test_connections_cut_in_the_middle_cost_a_retry(op, side):
    """Nobody is lost, everything arrives once, and the broken connections come back."""
    lost = []
    rng = random.Random(f"{op} {side}")
    async with two(3) as ((channel, a, ours), (_, b, theirs)):
        channel.on_lost(lost.append)
        await a.open("b")
        for number in range(3):
            await all_up(a)
            fill(ours if op is Op.WRITE else theirs, number)
            moving = asyncio.create_task(a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)], timeout_s=20))
            for _ in range(rng.randrange(1, 30)):
                await asyncio.sleep(0)
            ends = [rail.connection for rail in bundle(a).connections()]
            served = [one.connection for one in b._transports["tcp"]._served]
            for end in {"dialer": ends[:2], "acceptor": served[:2], "both": ends[:1] + served[1:]}[side]:
                end._transport.abort()
            await moving
            assert same(ours, theirs)
        await all_up(a)
        assert not lost and sum(rail.failures for rail in bundle(a).rails) > 0
        assert not b._transports["tcp"]._served or all(one._writes == {} for one in b._transports["tcp"]._served)


async def test_unread_bytes_of_a_broken_connection_never_land():
    """The first try of a WRITE sits in a socket that its reader has not looked at; the dialer's end breaks, the WRITE
    goes again on another connection and completes; what the old socket holds must not land afterwards."""
    async with two(2) as ((_, a, ours), (_, b, theirs)):
        await a.open("b")
        await all_up(a)
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, MIB // 2)])
        first = bundle(a).connections()[0]
        far = next(one for one in b._transports["tcp"]._served if one.rail_id == first.rail_id).connection
        far._transport.pause_reading()
        bundle(a).rails[0].bytes_per_s = 1e12  # so it is chosen
        fill(ours, 1)
        moving = asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, MIB // 2)]))
        await until(lambda: bundle(a).rails[0].in_flight)
        assert not moving.done() and not any(theirs.memory[: MIB // 2]), "it is in the socket"
        first.closed(first.connection, "its network card is gone")  # b has not heard of it
        await moving
        assert ours.memory[: MIB // 2] == theirs.memory[: MIB // 2]
        theirs.memory[:] = bytes(SIZE)
        if far._transport is not None and not far._transport.is_closing():
            far._transport.resume_reading()
        await asyncio.sleep(0.05)
        assert not any(theirs.memory[::4096])
        assert bundle(a).rails[0].resent == 1


async def test_a_cancelled_write_on_a_broken_connection_is_settled_first():
    async with two(2) as ((_, a, ours), (_, b, theirs)):
        await a.open("b")
        await all_up(a)
        first = bundle(a).connections()[0]
        far = next(one for one in b._transports["tcp"]._served if one.rail_id == first.rail_id).connection
        far._transport.pause_reading()
        bundle(a).rails[0].bytes_per_s = 1e12
        fill(ours, 2)
        moving = asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, MIB // 2)]))
        await until(lambda: bundle(a).rails[0].in_flight)
        moving.cancel()
        await until(lambda: any(one.stopped for one in first._transfers.values()))
        first.closed(first.connection, "its network card is gone")
        with pytest.raises(asyncio.CancelledError):
            await moving
        if far._transport is not None and not far._transport.is_closing():
            far._transport.resume_reading()
        await asyncio.sleep(0.05)
        assert not any(theirs.memory[::4096])


async def test_a_slow_connection_holds_up_only_what_it_carries():
    """While it answers nothing the other connection does the rest; once it is known to be slow it gets nothing."""
    async with two(2) as ((_, a, ours), (_, _, theirs)):
        fill(ours, 3)
        await a.open("b")
        await all_up(a)
        slow, quick = bundle(a).rails
        transport = bundle(a).connections()[0].connection._transport
        transport.pause_reading()  # no slice of it is acknowledged
        moving = asyncio.create_task(a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)]))
        await until(lambda: quick.moved and not quick.in_flight)
        assert not moving.done() and slow.in_flight
        transport.resume_reading()
        await moving
        assert same(ours, theirs) and not slow.failures and not slow.resent
        slow.bytes_per_s, before = 1e3, slow.moved
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert slow.moved == before


async def test_without_any_connection_the_peer_is_lost(monkeypatch):
    monkeypatch.setattr("net.transfer.tcp.bundle.REDIAL_S", 0.3)
    lost = []
    async with two(2) as ((channel, a, _), (_, b, _)):
        channel.on_lost(lost.append)
        await a.open("b")
        await all_up(a)

        async def nobody_answers(peer_id, purpose):
            raise PeerLost(f"nobody answers at {peer_id!r}")

        monkeypatch.setattr(channel.links, "dial", nobody_answers)
        for rail in bundle(a).connections():
            rail.connection._transport.abort()
        with pytest.raises(PeerLost, match="no data connection within"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert lost == ["b"]
        await asyncio.gather(a.fence("b"), b.fence("a"))


async def test_a_transfer_does_not_wait_for_the_pause_between_two_attempts_to_reopen_a_connection(monkeypatch):
    """The pauses grow to longer than a transfer waits: the peer was given up although it was back."""
    lost = []
    monkeypatch.setattr(Rail, "postpone", lambda self, now: setattr(self, "retry_at", now + 1000))
    async with two(1) as ((channel, a, ours), (_, _, theirs)):
        channel.on_lost(lost.append)
        await a.open("b")
        dial, tried = bundle(a)._dial, asyncio.Event()

        async def refused():
            tried.set()
            raise PeerLost("no route")

        monkeypatch.setattr(bundle(a), "_dial", refused)
        for rail in bundle(a).connections():
            rail.connection._transport.abort()
        await tried.wait()
        await until(lambda: bundle(a).rails[0].retry_at > 0)
        monkeypatch.setattr(bundle(a), "_dial", dial)
        fill(ours, 1)
        await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs) and not lost


async def test_a_peer_that_refuses_new_connections_has_given_this_node_up():
    lost = []
    async with two(2) as ((channel, a, _), (other, b, _)):
        channel.on_lost(lost.append)
        await a.open("b")
        await all_up(a)
        await until(lambda: len(b._transports["tcp"]._served) == 2)  # it has greeted both
        other.links._acceptors.pop("data")
        for rail in bundle(a).connections():
            rail.connection._transport.abort()
        with pytest.raises(PeerLost, match="no 'data' connections"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert lost == ["b"]
        await asyncio.gather(a.fence("b"), b.fence("a"))


async def test_a_slice_that_is_refused_stops_the_others():
    async with two(2) as ((_, a, _), (_, b, _)):
        b.unregister("of-b")
        with pytest.raises(TransferError, match="not registered there"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)])
        assert not any(rail.in_flight for rail in bundle(a).rails)
