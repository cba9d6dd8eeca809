"""KV that the decode node reads out of the prefill node's blocks: bytes, ends, and whose blocks are free when."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.core.emissions import Emission
from engine.core.kv_ready import KvTarget
from engine.handoff import messages
from engine.handoff.messages import Abort, Prefill, Pull, Reserve, pack_request
from engine.handoff.outgoing import KvMoves
from engine.handoff.own_load import OwnLoad
from engine.handoff.rail_news import RailNews
from engine.handoff.service import EngineService
from engine.handoff.updates import Failed, HandedOver, Landed, decode_all
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import decode, encode
from net.errors import RemoteError
from net.gossip.load_words import LoadWords
from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from net.transfer.common.spans import pack_spans, unpack_spans
from net.transfer.engine import Op, TransferEngine, TransferError
from sched.gossip.state import NodeRecord
from sched.rejection import OutputLengths, Rejection
from tests.engine.handoff.test_service import PROMISE, IdleWorker
from tests.net.peers import channels, until

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
ROOT = root_key("toy", GEOMETRY)
BLOCKS = 16


class GatedTransfer(TransferEngine):
    """READs wait until they are let through."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = asyncio.Event()
        self.reading = 0

    async def submit(self, peer, op, *rest):
        if op is Op.READ:
            self.reading += 1
            try:
                await self.gate.wait()
            finally:
                self.reading -= 1
        return await super().submit(peer, op, *rest)


class Side:
    """A node without a model."""

    def __init__(self, channel, transfer) -> None:
        self.channel, self.transfer = channel, transfer
        self.region = Region.shared("kv", BLOCKS * GEOMETRY.block_bytes)
        transfer.register(self.region)
        self.worker = IdleWorker(Batcher(BlockPool(BLOCKS), 4, 4, 64, 1000, {0}))
        metrics = Metrics("m", channel.node_id)
        self.words = LoadWords(channel, transfer)
        idle = SimpleNamespace(
            record=NodeRecord, running_soon=lambda seconds: 0, step_s=lambda batch: 0.01, lengths=OutputLengths()
        )
        load = OwnLoad(channel.node_id, idle, self.words, Rejection())
        moves = KvMoves(GEOMETRY, RailNews(transfer), "pull")
        self.service = EngineService(channel, transfer, self.worker, moves, 8, load, metrics)

    @property
    def pool(self) -> BlockPool:
        return self.worker.batcher.pool

    def block(self, block_id: int) -> memoryview:
        return self.region.memory[block_id * GEOMETRY.block_bytes : (block_id + 1) * GEOMETRY.block_bytes]

    def idle(self) -> bool:
        self.pool.check_integrity()
        return self.pool.references() == {"request": 0, "transfer": 0} and not any(self.service.held().values())


@asynccontextmanager
async def pair(count: int = 8):
    """(acceptor's channel, prefill side, decode side, target): a prompt of `count` tokens is computed on p."""
    async with channels("a", "p", "d") as (a, p_channel, d_channel):
        p = Side(p_channel, TransferEngine(p_channel, ("tcp",)))
        d = Side(d_channel, GatedTransfer(d_channel, ("tcp",)))
        a.handle(messages.TOKENS, heard := Heard())
        request = Request("r", [1] * count, count, SamplingParams(max_tokens=4), 0.0, ROOT)
        wire, data = pack_request(request)
        reply, _ = await a.call("d", messages.RESERVE, encode(Reserve(wire, ["p"])), data)
        target = decode(KvTarget, reply)
        assert target.node == "d"
        await a.call("p", messages.PREFILL, encode(Prefill(wire, PROMISE, target)), data)
        try:
            yield a, p, d, heard
        finally:
            for side in (p, d):
                await side.service.close()
                await side.words.close()
                await side.transfer.close()
                side.region.close()


class Heard:
    """What the acceptor was told."""

    def __init__(self) -> None:
        self.updates: list[Any] = []

    async def __call__(self, peer, body, data):
        self.updates += [update for _, update in decode_all(body)]


def compute(side: Side) -> None:
    """One step over the whole prompt: bytes that tell blocks and layers apart, layer by layer, then the token."""
    step = side.worker.batcher.schedule(0.0)
    (row,) = step.rows
    for block_id in row.request.block_ids:
        side.block(block_id)[:] = bytes([block_id + 1]) * GEOMETRY.block_bytes
    for layer in range(GEOMETRY.num_layers):
        side.worker.transfers["r"].layer_done(row.request.block_ids, layer, row.start, row.start + row.num_tokens)
    done = side.worker.batcher.commit(0.0, step, [(5,)])
    side.service.on_emissions([Emission(done.emitted[0][0], 5)])


async def test_the_decode_node_reads_what_was_computed_and_then_both_let_go():
    async with pair(10) as (_, p, d, heard):
        source = list(range(3))
        compute(p)
        assert p.pool.references()["transfer"] > 0  # the blocks stay until the decode node has them
        d.transfer.gate.set()
        await until(lambda: HandedOver() in heard.updates)
        landed, _ = heard.updates[-2:]
        assert isinstance(landed, Landed), "before the decode node may have answered"
        assert [event["event"] for event in landed.report.events].count("kv_moved") == 1
        (request,) = d.worker.batcher.requests.values()
        assert request.num_computed == 10 and request.token_ids[-1] == 5
        assert [bytes(d.block(b))[:1] for b in request.block_ids] == [bytes([b + 1]) for b in source]
        await until(p.idle)
        d.worker.abort("r")
        assert d.pool.references() == {"request": 0, "transfer": 0}


async def test_an_abort_ends_the_reads_and_frees_both_sides():
    async with pair() as (a, p, d, _):
        compute(p)
        await until(lambda: d.transfer.reading == 1)
        for node in ("p", "d"):
            a.post(node, messages.ABORT, encode(Abort(["r"])))
        await until(lambda: p.idle() and d.idle())
        assert d.transfer.reading == 0


@pytest.mark.parametrize("lost", ["p", "d"])
async def test_a_lost_peer_in_the_middle_of_a_pull_frees_the_blocks_of_the_other(lost):
    async with pair() as (_, p, d, heard):
        compute(p)
        await until(lambda: d.transfer.reading == 1)
        (d if lost == "p" else p).channel.drop(lost, "killed by the test")
        await until(lambda: any(isinstance(update, Failed) for update in heard.updates))
        if lost == "p":
            await until(d.idle)
        else:
            await until(p.idle)


async def test_a_pull_outside_the_reserved_blocks_is_refused():
    async with pair() as (_, p, d, _):
        (reserved,) = [r.block_ids for r in d.worker.batcher.requests.values()]
        other = next(b for b in range(BLOCKS) if b not in reserved)
        for span in ((0, other * GEOMETRY.block_bytes, 8), (0, (reserved[-1] + 1) * GEOMETRY.block_bytes - 4, 8)):
            with pytest.raises(RemoteError, match="lie outside the request's blocks"):
                body = encode(Pull("r", "kv", 1.0))
                await p.channel.call("d", messages.PULL, body, [pack_spans([span])])
        with pytest.raises(RemoteError, match="ended"):
            await p.channel.call("d", messages.PULL, encode(Pull("none", "kv", 1.0)), [b""])


def test_spans_come_back_from_the_wire():
    spans = [(1, 2, 3), (1 << 40, 0, 64)]
    assert unpack_spans(memoryview(pack_spans(spans))) == spans
    with pytest.raises(TransferError, match="not a multiple"):
        unpack_spans(memoryview(bytes(23)))
