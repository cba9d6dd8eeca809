"""Bulk calls over TCP: bytes behind questions and answers, errors, calls given up, connections cut, peers that hang."""

import asyncio
import random
from pathlib import Path

import pytest

from net.channel.channel import Channel
from net.errors import RemoteError
from net.transfer.engine import TransferEngine
from net.transfer.tcp.blocking_calls import BlockingCalls
from net.transfer.tcp.bulk_call import Answer, BulkCall, Views
from tests.net.pairs import neighbours
from tests.net.peers import until

MIB = 1 << 20
PATIENT_S = 60.0


class Get(BulkCall):
    """Bytes `first` to `last` of the peer's region, to the start of ours."""

    def __init__(self, region, first, last):
        super().__init__("get", {"first": first, "last": last}, last - first)
        self.region, self.seen = region, []

    def place(self, body, nbytes):
        if nbytes != self.expected:
            raise RemoteError("not what was asked for", "bad_answer")
        middle = nbytes // 3
        return Views([self.region.memory[:middle], self.region.memory[middle:nbytes]])

    def received(self, moved):
        super().received(moved)
        self.seen.append(moved)


class Put(BulkCall):
    """The start of our region to that of the peer's."""

    def __init__(self, region, nbytes):
        super().__init__("put", {"nbytes": nbytes}, nbytes)
        self.region, self.nbytes, self.tails = region, nbytes, 0

    def data(self):
        return Views([self.region.memory[: self.nbytes]])

    def tail(self):
        self.tails += 1
        return {"sum": sum(self.region.memory[: self.nbytes : 997])}


class Arriving:
    regions = ("of-b",)

    def __init__(self, home, nbytes):
        self.home, self.target, self.nbytes = home, Views([home.region.memory[:nbytes]]), nbytes

    def finish(self, tail):
        self.home.ends.append("finished")
        total = sum(self.home.region.memory[: self.nbytes : 997])
        return Answer({"same": total == tail["sum"]} if tail else {"total": total})

    def drop(self):
        self.home.ends.append("dropped")


class Home:
    """What answers at the peer."""

    def __init__(self, engine, region):
        self.engine, self.region, self.ends, self.sent = engine, region, [], 0
        self.gate = asyncio.Event()
        engine.bulk.answer("get", self.get)
        engine.bulk.answer("slow", self.slow)
        engine.bulk.answer("broken", lambda peer, body: 1 / 0)
        engine.bulk.receive("put", lambda peer, body, nbytes: Arriving(self, nbytes))

    def get(self, peer, body):
        views = [self.region.memory[body["first"] : body["last"]]]
        return Answer({"peer": peer}, views, body["last"] - body["first"], self.was_sent, ("of-b",))

    def was_sent(self):
        self.sent += 1

    async def slow(self, peer, body):
        await self.gate.wait()
        return self.get(peer, body)


@pytest.fixture
async def nodes():
    """(engine of a, its region, Home at b)"""
    async with neighbours("tcp") as ((a, ours), (b, theirs)):
        theirs.memory[:] = random.Random(1).randbytes(MIB) * (len(theirs.memory) // MIB)
        yield a, ours, Home(b, theirs)


async def ask(engine, call, timeout_s=PATIENT_S):
    await engine.bulk.ask("b", call, timeout_s, timeout_s)
    return call


def rails(engine):
    return engine._transports["tcp"]._bundles["b", "data"].connections()


@pytest.mark.parametrize("nbytes", [0, 1, 70_000, 400_000, 9 * MIB + 5])
async def test_an_answer_comes_straight_to_its_place(nodes, nbytes):
    a, ours, home = nodes
    assert a.bulk.reaches("b")
    for at in range(3):
        call = await ask(a, Get(ours, at, at + nbytes))
        assert call.answer["peer"] == "a" and ours.memory[:nbytes] == home.region.memory[at : at + nbytes]
        assert call.seen == sorted(set(call.seen)) and call.moved == nbytes
    await until(lambda: home.sent == 3)
    row = a.snapshot()[0]
    assert row["bytes_read"] == 3 * nbytes and not any(rail["in_flight"] for rail in row["rails"])


@pytest.mark.parametrize("nbytes", [1, 70_000, 400_000, 9 * MIB + 5])
async def test_a_question_has_its_bytes_before_its_tail(nodes, nbytes):
    a, ours, home = nodes
    for seed in range(3):
        ours.memory[:nbytes] = random.Random(seed).randbytes(nbytes)
        call = await ask(a, Put(ours, nbytes))
        assert call.answer == {"same": True} and call.tails == 1
        assert ours.memory[:nbytes] == home.region.memory[:nbytes]
    assert home.ends == ["finished"] * 3


@pytest.mark.parametrize("nbytes", [1, 70_000, 4 * MIB])
async def test_a_whole_question_has_no_tail(nodes, nbytes):
    a, ours, home = nodes
    ours.memory[:nbytes] = random.Random(nbytes).randbytes(nbytes)
    calls = [Put(ours, nbytes) for _ in range(3)]
    for call in calls:
        call.is_whole = True
    await asyncio.gather(*(ask(a, call) for call in calls))
    assert [(call.answer, call.tails) for call in calls] == [({"total": sum(ours.memory[:nbytes:997])}, 0)] * 3
    assert ours.memory[:nbytes] == home.region.memory[:nbytes]
    assert home.ends == ["finished"] * 3


@pytest.mark.expects_error("'broken' requested by")
async def test_errors_reach_the_asker_and_the_connection_lives_on(nodes):
    a, ours, home = nodes

    def none(peer, body, nbytes):
        raise RemoteError("no room", "full")

    home.region.memory[:] = bytes(len(home.region.memory))
    with pytest.raises(RemoteError, match="does not answer 'nothing'"):
        await ask(a, BulkCall("nothing", {}, 0))
    with pytest.raises(RemoteError, match="internal error in broken"):
        await ask(a, BulkCall("broken", {}, 0))
    with pytest.raises(RemoteError, match="none were requested"):
        await ask(a, BulkCall("get", {"first": 0, "last": 9}, 9))
    ours.memory[:] = bytes([7]) * len(ours.memory)
    put = Put(ours, 5 * MIB)
    put.kind = "unknown"
    with pytest.raises(RemoteError, match="does not accept 'unknown'"):
        await ask(a, put)
    assert not any(home.region.memory[::4096]), "its bytes went nowhere"
    await ask(a, Get(ours, 0, 100))
    assert not any(rail["failures"] for rail in a.snapshot()[0]["rails"])


async def test_calls_that_are_given_up_move_nothing_more(nodes):
    a, ours, home = nodes
    rng = random.Random(3)
    for round_ in range(30):
        put = round_ % 2
        nbytes = rng.randrange(1, 9 * MIB)
        asking = asyncio.create_task(ask(a, Put(ours, nbytes) if put else Get(ours, 0, nbytes)))
        for _ in range(rng.randrange(0, 40)):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert not any(rail.connection.unsent() for rail in rails(a)) or not put
        ours.memory[:nbytes] = bytes(nbytes)
        await ask(a, Get(ours, 0, 0))
        if not put:
            assert not any(ours.memory[:nbytes:4096])
    slow = Get(ours, 0, MIB)
    slow.kind = "slow"
    with pytest.raises(TimeoutError, match="did not answer 'slow' within"):
        await ask(a, slow, 0.01)
    home.gate.set()
    await ask(a, Get(ours, 0, MIB))
    assert ours.memory[:MIB] == home.region.memory[:MIB]


async def test_a_connection_that_breaks_costs_another_try(nodes, monkeypatch):
    a, ours, home = nodes
    monkeypatch.setattr("net.transfer.common.rails.BACKOFF_S", 0.02)
    rng = random.Random(4)
    for round_ in range(6):
        put = round_ % 2
        await until(lambda: len(rails(a)) == 2) if round_ else await ask(a, Get(ours, 0, 0))
        ours.memory[: 9 * MIB] = rng.randbytes(MIB) * 9
        asking = asyncio.create_task(ask(a, Put(ours, 9 * MIB) if put else Get(ours, 0, 9 * MIB)))
        for _ in range(rng.randrange(1, 30)):
            await asyncio.sleep(0)
        for rail in rails(a)[:1]:
            rail.connection._transport.abort()
        call = await asking
        assert call.answer == {"same": True} if put else call.moved == 9 * MIB
        assert ours.memory[: 9 * MIB] == home.region.memory[: 9 * MIB]


async def test_a_connection_that_breaks_while_its_socket_is_full_costs_another_try(nodes, monkeypatch):
    """The sender waits for room then, and is woken by the end of the connection after its transfer was failed."""
    a, ours, home = nodes
    monkeypatch.setattr("net.transfer.common.rails.BACKOFF_S", 0.02)
    await ask(a, Get(ours, 0, 0))
    await until(lambda: len(rails(a)) == 2)
    ours.memory[: 30 * MIB] = random.Random(5).randbytes(MIB) * 30
    served = [one.connection._transport for one in home.engine._transports["tcp"]._served]
    for transport in served:
        transport.pause_reading()
    asking = asyncio.create_task(ask(a, Put(ours, 30 * MIB)))
    await until(lambda: any(rail.connection.congested for rail in rails(a)))
    [full] = [rail for rail in rails(a) if rail.connection.congested]
    full.connection._transport.abort()
    for transport in served:
        if not transport.is_closing():
            transport.resume_reading()
    assert (await asking).answer == {"same": True}
    assert ours.memory[: 30 * MIB] == home.region.memory[: 30 * MIB]


@pytest.mark.parametrize("put", [False, True])
async def test_a_peer_that_hangs_costs_the_deadline_and_gets_no_memory(nodes, put):
    a, ours, home = nodes
    await ask(a, Get(ours, 0, 0))
    for rail in rails(a):
        rail.connection._transport.pause_reading()  # neither end hears the other
    served = [one.connection._transport for one in home.engine._transports["tcp"]._served]
    for transport in served:
        transport.pause_reading()
    with pytest.raises(TimeoutError):
        await ask(a, Put(ours, 30 * MIB) if put else Get(ours, 0, MIB), 0.05)
    assert not any(rail.connection.unsent() for rail in rails(a))
    for transport in served:
        if not transport.is_closing():
            transport.resume_reading()
    for rail in rails(a):
        if not rail.connection._transport.is_reading():
            rail.connection._transport.resume_reading()
    assert (await ask(a, Get(ours, 0, 0))).answer
    assert "finished" not in home.ends


@pytest.mark.parametrize("put", [False, True])
async def test_an_unregistered_region_ends_the_calls_that_use_it(nodes, put):
    a, ours, home = nodes
    await ask(a, Get(ours, 0, 0))
    ours.memory[:] = bytes(len(ours.memory))
    served = [one.bulk for one in home.engine._transports["tcp"]._served]
    asking = asyncio.create_task(ask(a, Put(ours, 30 * MIB) if put else Get(ours, 0, 30 * MIB)))
    await until(lambda: any(one._arriving or one._answering for one in served))
    home.engine.unregister("of-b")
    before = bytes(home.region.memory[::4096])
    with pytest.raises(RemoteError, match="'of-b' was unregistered"):
        await asking
    await ask(a, Get(ours, 0, 0))
    assert bytes(home.region.memory[::4096]) == before, "late bytes go nowhere"
    assert home.ends == (["dropped"] if put else [])
    await until(lambda: home.sent == (2 if put else 3))


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("leaves", ["in good order", "cut"])
async def test_the_sockets_to_former_processes_of_a_peer_are_closed(leaves):
    """Threads that ask keep their sockets for the next question; a peer that starts again and again must not fill the
    table of descriptors."""
    channel = Channel("a", {})
    engine = TransferEngine(channel, ["tcp"])
    await channel.start("127.0.0.1")
    calls = BlockingCalls(channel.links, 0.0)
    opened = []
    try:
        for _ in range(4):
            other = Channel("b", {})
            theirs = TransferEngine(other, ["tcp"])
            theirs.bulk.answer("hi", lambda peer, body: Answer({}))
            channel.introduce("b", await other.start("127.0.0.1"))
            await engine.open("b")
            asked = (asyncio.to_thread(calls.ask_one, "b", BulkCall("hi", {}, 0), PATIENT_S) for _ in range(4))
            assert await asyncio.gather(*asked) == [None] * 4
            if leaves == "cut":
                channel.drop("b", "test")
            await theirs.close()
            await other.close()
            await until(lambda: channel.links.door("b") is None)
            await asyncio.sleep(0.1)
            opened.append(descriptors())
        assert opened[-1] <= opened[0], opened
    finally:
        calls.close()
        await engine.close()
        await channel.close()
