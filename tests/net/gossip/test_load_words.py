"""Load words over real sockets and shared memory. By RDMA: tests/rdma/test_load_words.py."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from net.errors import PeerLost, RemoteError
from net.gossip.load_words import PAGE, LoadWords
from net.transfer.engine import TransferEngine
from sched.gossip.load_word import LoadWord
from tests.net.peers import channels, until


@asynccontextmanager
async def nodes(*names, order=("tcp",), **options):
    """The load words of each node."""
    async with channels(*names) as made:
        engines = [TransferEngine(channel, order) for channel in made]
        words = [LoadWords(channel, engine, **options) for channel, engine in zip(made, engines, strict=True)]
        try:
            yield words
        finally:
            for one in words:
                await one.close()
            for engine in engines:
                await engine.close()


async def test_a_probe_by_messages_brings_what_each_node_told_last():
    async with nodes("a", "b", "c") as (a, b, _):
        a.publish(LoadWord(work_s=1.0))
        b.publish(LoadWord(work_s=2.0))
        b.publish(LoadWord(work_s=3.0))
        loads = await a.probe(["b", "c", "a", "b"])
        assert {peer: load.word.work_s for peer, load in loads.items()} == {"a": 1.0, "b": 3.0, "c": 0.0}
        again = (await a.probe(["b"]))["b"].word
        assert again.version > loads["b"].word.version
        assert 0 <= again.age_s(time.time()) < 60
        assert a.counters == {"read_message": 3}


@pytest.mark.expects_error("this node cannot report its load")
async def test_a_source_is_asked_at_every_probe_and_one_that_fails_keeps_the_last_word():
    async with nodes("a", "b") as (a, b):
        running = [0]

        def load() -> LoadWord:
            if running[0] == 3:
                raise RuntimeError("no load")
            running[0] += 1
            return LoadWord(running=running[0])

        b.start(load, period_s=3600.0)
        seen = [(await a.probe(["b"]))["b"].word.running for _ in range(4)]
        assert seen == sorted(seen) and seen[-1] == 3


async def test_a_peer_that_does_not_answer_is_left_out():
    async with nodes("a", "b", "c") as (a, b, c):
        await b.close()

        async def silence(peer, body, data):
            await asyncio.sleep(60)

        c._channel.handle("load.read", silence)
        loads = await a.probe(["b", "c", "nobody"], timeout_s=0.2)
        assert "c" not in loads and "nobody" not in loads
        with pytest.raises((PeerLost, TimeoutError, RemoteError)):
            await a.reserve("nobody", 5, timeout_s=0.2)


async def test_claims_are_ordered_and_end_by_arrival_release_or_age():
    now = [100.0]
    async with nodes("a", "b", "c", claim_ttl_s=10.0, clock=lambda: now[0]) as (a, b, c):
        before = (await a.probe(["b"]))["b"]
        claims = await asyncio.gather(*(one.reserve("b", 10) for one in (a, c, b, a)))
        assert sorted(claim.previous for claim in claims) == [0, 10, 20, 30]
        after = (await a.probe(["b"]))["b"]
        assert (after.claimed - before.claimed, after.outstanding, b.outstanding) == (40, 40, 40)
        b.arrived(10)
        assert b.outstanding == 30
        await a.release(claims[0])
        await b.release(claims[2])
        await until(lambda: b.outstanding == 10)
        load = (await c.probe(["b"]))["b"]
        assert (load.claimed, load.outstanding) == (40, 10)
        assert load.wait_s == pytest.approx(10e-6)
        now[0] += 9.0
        late = await c.reserve("b", 7)
        assert (late.previous, b.outstanding) == (40, 17)
        now[0] += 1.0
        assert b.outstanding == 7
        await a.release(claims[3])  # its time was over: it must not end the claim of c
        assert (await a.probe(["b"]))["b"].outstanding == 7
        for amount in (0, -1, 1 << 62):
            with pytest.raises(ValueError, match="between"):
                await a.reserve("b", amount)
        with pytest.raises(RemoteError, match="amount"):
            await a._channel.call("b", "load.claim", {"amount": "much"})


async def test_over_shared_memory_a_read_needs_no_python_of_the_peer():
    async with nodes("a", "b", order=("shm", "tcp")) as (a, b):
        b.publish(LoadWord(running=5))
        assert (await a.probe(["b"]))["b"].word.running == 5
        await until(lambda: a._transfer.is_one_sided("b"))
        b.publish(LoadWord(running=6))

        async def never(peer, body, data):
            raise AssertionError("asked by a message")

        b._channel.handle("load.read", never)
        assert (await a.probe(["b"]))["b"].word.running == 6
        assert a.counters == {"read_message": 1, "read_one_sided": 1}
        claim = await a.reserve("b", 4)
        assert (claim.previous, claim.one_sided, b.outstanding) == (0, False, 4)


async def test_a_word_that_stays_torn_is_asked_for_by_a_message():
    async with nodes("a", "b", order=("shm", "tcp")) as (a, b):
        await a._transfer.open("b")
        b.publish(LoadWord(running=5))
        b._page.memory[10] ^= 0xFF
        load = (await a.probe(["b"]))["b"]
        assert load.word.running == 5, "the answer to a message is a word that was just written"
        assert (a.counters["torn"], a.counters["read_message"]) == (4, 1)


async def test_closing_takes_the_page_away():
    async with nodes("a", "b") as (a, b):
        await a.close()
        await a.close()
        assert PAGE not in a._transfer._regions
        assert (await b.probe(["a"], timeout_s=0.5)) == {}
