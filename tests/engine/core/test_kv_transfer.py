"""One prompt's KV on its way: when it may leave, that blocks are held meanwhile, and what stopping leaves behind."""

import asyncio

import pytest

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.pool.policies import policies
from engine.core.kv_ready import KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer, TransferCut
from net.errors import PeerLost
from net.transfer.engine import Completion

GEOMETRY = BlockGeometry(num_layers=3, num_kv_heads=1, block_size=4, head_size=8, dtype="float32")
TOKENS = 10


class Wire:
    """A Mover that moves when it is let."""

    def __init__(self):
        self.moved = []
        self.open = asyncio.Event()
        self.broken = False

    async def move(self, spans):
        await self.open.wait()
        if self.broken:
            raise PeerLost("gone")
        self.moved.append(list(spans))
        return Completion(sum(length for _, _, length in spans), 0.001, "tcp")


class Prompt:
    """Blocks 0-2 here, 7, 8, 9 there."""

    def __init__(self, overlap):
        self.pool = BlockPool(16, policies["lru"]())
        self.blocks = self.pool.allocate(3)
        self.wire = Wire()
        target = KvTarget("d", "kv", [7, 8, 9], 0, "")
        self.transfer = KvTransfer("d", self.wire, KvReady(GEOMETRY, target, TOKENS, overlap), self.pool)

    def compute(self, start, end):
        for layer in range(GEOMETRY.num_layers):
            self.transfer.layer_done(self.blocks, layer, start, end)


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("overlap", ["layer", "chunk", "none"])
async def test_with_none_nothing_leaves_before_the_last_step_is_over(overlap):
    prompt = Prompt(overlap)
    prompt.wire.open.set()
    prompt.compute(0, 6)
    await turns()
    assert bool(prompt.wire.moved) == (overlap != "none")
    prompt.compute(6, TOKENS)
    await turns()
    assert bool(prompt.wire.moved) == (overlap != "none"), "the last layer is done, the step is not"
    report = await prompt.transfer.finish()
    assert (report.batches == 1) == (overlap == "none")
    assert len(report.intervals) == report.batches == len(prompt.wire.moved)
    landed = {there + i for spans in prompt.wire.moved for _, there, length in spans for i in range(length)}
    size = GEOMETRY.block_bytes
    assert landed == {block * size + i for block in (7, 8, 9) for i in range(size)}
    prompt.pool.release(prompt.blocks)
    assert prompt.pool.usage()["held"] == 0


@pytest.mark.parametrize("overlap", ["layer", "none"])
async def test_stopping_lets_the_blocks_go(overlap):
    prompt = Prompt(overlap)
    prompt.compute(0, 6)
    prompt.compute(6, TOKENS)
    await turns()
    prompt.pool.release(prompt.blocks)
    assert prompt.pool.usage()["held"] > 0, "what waits is held"
    prompt.wire.broken = True
    prompt.wire.open.set()
    await prompt.transfer.stop()
    prompt.transfer.layer_done(prompt.blocks, 0, 6, TOKENS)
    assert prompt.pool.usage()["held"] == 0
    prompt.pool.check_integrity()


@pytest.mark.parametrize("overlap", ["layer", "chunk", "none"])
async def test_what_was_stopped_does_not_count_as_landed(overlap):
    """A hand-over that waits for the end must not tell the decode node that everything is there."""
    prompt = Prompt(overlap)
    prompt.compute(0, 6)
    await turns()
    prompt.compute(6, TOKENS)
    ended = asyncio.ensure_future(prompt.transfer.finish())
    stopped = asyncio.ensure_future(prompt.transfer.stop())
    await turns()
    prompt.wire.open.set()
    await stopped
    with pytest.raises(TransferCut):
        await ended
    prompt.pool.release(prompt.blocks)
    assert prompt.pool.usage()["held"] == 0


async def test_a_lost_peer_is_told_at_the_end():
    prompt = Prompt("layer")
    prompt.wire.broken = True
    prompt.wire.open.set()
    prompt.compute(0, TOKENS)
    with pytest.raises(PeerLost):
        await prompt.transfer.finish()
    await prompt.transfer.stop()
    prompt.pool.release(prompt.blocks)
    assert prompt.pool.usage()["held"] == 0


@pytest.mark.parametrize("overlap", ["layer", "chunk", "none"])
async def test_it_tells_how_many_tokens_have_landed(overlap):
    prompt, told = Prompt(overlap), []
    prompt.transfer.watch(told.append)
    prompt.compute(0, 6)
    await turns()
    assert told == []
    prompt.wire.open.set()
    await turns()
    assert told == ([] if overlap == "none" else [6])
    prompt.compute(6, 10)
    await prompt.transfer.finish()
    assert told == ([10] if overlap == "none" else [6, 10])
