"""Load words by RDMA: 96 bytes read, and claims made, without the owner's Python."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from net.gossip.load_words import PAGE, LoadWords
from net.transfer.engine import Op
from sched.gossip.load_word import CLAIMED_AT, COUNTERS, LoadWord
from tests.rdma.nodes import SIZE, fill, two_nodes, until


@asynccontextmanager
async def words(**options):
    async with two_nodes(order=("rdma", "tcp")) as (a, b):
        made = [LoadWords(node.channel, node.engine, **options) for node in (a, b)]
        try:
            yield a, b, *made
        finally:
            for one in made:
                await one.close()


async def never(peer, body, data):
    raise AssertionError("asked by a message")


async def test_reads_and_claims_need_no_python_of_the_owner():
    now = [0.0]
    async with words(claim_ttl_s=10.0, clock=lambda: now[0]) as (a, b, mine, theirs):
        theirs.publish(LoadWord(running=1))
        assert (await mine.probe(["b"], 10.0))["b"].word.running == 1
        await until(lambda: a.engine.is_one_sided("b"))
        for kind in ("load.read", "load.claim", "load.release"):
            b.channel.handle(kind, never)
        theirs.publish(LoadWord(running=2, work_s=0.5))
        load = (await mine.probe(["b"], 10.0))["b"]
        assert (load.word.running, load.claimed) == (2, 0)
        claims = await asyncio.gather(*(mine.reserve("b", 100, 10.0) for _ in range(5)))
        assert sorted(claim.previous for claim in claims) == [0, 100, 200, 300, 400]
        assert all(claim.one_sided for claim in claims)
        assert COUNTERS.unpack_from(theirs._page.memory, CLAIMED_AT) == (500, 0, 0, 0)
        assert (await mine.probe(["b"], 10.0))["b"].wait_s == pytest.approx(0.5 + 500e-6)
        own = await theirs.reserve("b", 7)
        assert (own.previous, theirs.outstanding) == (500, 507)
        assert (await mine.probe(["b"], 10.0))["b"].outstanding == 507
        assert (await mine.reserve("b", 1, 10.0)).previous == 507, "with the claims by message, as of the last probe"
        await mine.release(claims[0])
        theirs.arrived(100)
        assert theirs.outstanding == 308
        assert (await mine.probe(["b"], 10.0))["b"].outstanding == 308
        now[0] = 11.0
        theirs.publish(LoadWord(running=3))
        assert (await mine.probe(["b"], 10.0))["b"].outstanding == 0
        await mine.release(claims[1])
        assert theirs.outstanding == 0
        assert mine.counters["read_message"] == 1 and mine.counters["claimed_message"] == 0


async def test_a_probe_passes_bulk_and_rewritten_words_are_never_torn():
    async with words() as (a, b, mine, theirs):
        await a.engine.open("b")
        sent = fill(a.region, 1)
        bulk = asyncio.create_task(a.engine.submit("b", Op.WRITE, "kv-a", "kv-b", [(0, 0, SIZE)] * 4, timeout_s=500))
        await asyncio.sleep(0)
        seen = []
        for number in range(30):
            theirs.publish(LoadWord(running=number, waiting_batch=number))
            word = (await mine.probe(["b"], 30.0))["b"].word
            assert word.running == word.waiting_batch
            seen.append(bulk.done())
        assert not seen[0], "the probe did not wait for the bulk"
        await bulk
        assert bytes(b.region.memory) == sent
        b.engine.unregister(PAGE)
        await until(lambda: PAGE not in a.engine._transports["rdma"].link("b")._regions)
        assert await mine.probe(["b"], 2.0) == {}
        b.engine.register(theirs._page)
