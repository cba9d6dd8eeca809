"""A prompt's KV pulled by RDMA: what the prefill node offers layer by layer, the decode node reads into its own blocks.
The same classes as in a node, without a model: tests/rdma/test_serving.py has one, and pushes."""

import asyncio

import pytest

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.pool.policies import policies
from engine.core.kv_ready import KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer
from engine.handoff import messages
from engine.handoff.messages import Pull, Pulled
from engine.handoff.pull import KvPull, PullOffer
from net.bodies import typed
from net.errors import RemoteError
from net.transfer.common.spans import unpack_spans
from tests.rdma.nodes import fill, rails_of, two_nodes

GEOMETRY = BlockGeometry(num_layers=4, num_kv_heads=2, block_size=16, head_size=64, dtype="float32")
THERE = [9, 2, 5, 30, 17]
TOKENS = 16 * len(THERE) - 3


@pytest.mark.parametrize("overlap", ["layer", "none"])
async def test_pulled_blocks_have_the_bytes_of_the_prefill_node(overlap):
    async with two_nodes() as (prefill, decode):
        size = GEOMETRY.block_bytes
        sent = fill(prefill.region, 1)
        before = fill(decode.region, 2)
        reads = KvPull(decode.engine, "kv-b", size, "a", THERE)

        async def pull(peer, body, data):
            done = await reads.read(body.region, unpack_spans(data), body.timeout_s)
            return Pulled(done.nbytes, done.seconds, done.transport)

        decode.channel.handle(messages.PULL, typed(Pull, pull))
        pool = BlockPool(32, policies["lru"]())
        here = pool.allocate(len(THERE))
        target = KvTarget("b", "kv-b", THERE, 0, "")
        offer = PullOffer(prefill.channel, "kv-a", "r", target, 60.0)
        transfer = KvTransfer("b", offer, KvReady(GEOMETRY, target, TOKENS, overlap), pool)
        for start, end in ((0, 40), (40, TOKENS)):
            for layer in range(GEOMETRY.num_layers):
                transfer.layer_done(here, layer, start, end)
                await asyncio.sleep(0)
        report = await transfer.finish()
        assert report.transport == "rdma" and (report.batches == 1) == (overlap == "none")
        for mine, theirs in zip(here, THERE, strict=True):
            assert decode.region.memory[theirs * size : (theirs + 1) * size] == sent[mine * size : (mine + 1) * size]
        untouched = set(range(32)) - set(THERE)
        assert all(
            decode.region.memory[i * size : (i + 1) * size] == before[i * size : (i + 1) * size] for i in untouched
        )
        assert sum(rail.moved for rail in rails_of(decode, "a")) == report.nbytes
        pool.release(here)
        assert pool.usage()["held"] == 0
        await reads.stop()
        with pytest.raises(RemoteError, match="has ended"):
            await offer.move([(0, THERE[0] * size, 8)])
