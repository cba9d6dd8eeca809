"""Requests that wait for blocks for KV from a prefill node: in the order of the queue, not of their arrival here."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.handoff.incoming import Incoming, KvForm
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.errors import RemoteError
from net.metrics.events import Metrics
from sched.queueing import EDF
from tests.engine.handoff.test_service import GEOMETRY, ROOT, IdleWorker, Wires


def request(name: str, service_class: str = "batch", blocks: int = 2) -> Request:
    prompt = [len(name)] * (4 * blocks)
    made = Request(name, prompt, len(prompt), SamplingParams(max_tokens=4), time.monotonic(), ROOT)
    made.service_class = service_class
    return made


class Node:
    def __init__(self, num_blocks: int = 8) -> None:
        rules = BatchRules(prefix_caching=False, order=EDF())
        self.worker = IdleWorker(Batcher(BlockPool(num_blocks), 4, 4, 64, 1000, {0}, rules))
        self.cancelled: set[str] = set()
        transfer = SimpleNamespace(epoch_of=lambda node: "")
        self.incoming = Incoming(
            Wires(),
            transfer,
            self.worker,
            KvForm(GEOMETRY.block_bytes),
            100,
            Metrics("m", "n"),
            self.cancelled.__contains__,
        )
        self.got: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, one: Request) -> Request:
        async def reserve() -> None:
            await self.incoming.reserve(one, "p")
            self.got.append(one.request_id)

        self.tasks.append(asyncio.create_task(reserve()))
        return one

    async def end(self, name: str) -> None:
        """It ends, and its blocks are free."""
        reservation = self.incoming.take(name)
        self.worker.abort(name)
        self.worker.batcher.pool.unhold(reservation.held)
        self.incoming._ending.clear()
        self.incoming.blocks_freed()
        await asyncio.sleep(0.01)


async def test_blocks_go_to_the_next_in_the_order_and_a_cancelled_one_waits_no_longer():
    node = Node()
    node.ask(request("holder", blocks=8))
    await asyncio.sleep(0)
    for name, service_class in {"a": "batch", "b": "batch", "gone": "standard", "chat": "interactive"}.items():
        node.ask(request(name, service_class))
        await asyncio.sleep(0.002)
    assert node.got == ["holder"]
    node.cancelled.add("gone")
    node.incoming.blocks_freed()
    with pytest.raises(RemoteError, match="cancelled before it had blocks"):
        await node.tasks[3]
    await node.end("holder")
    assert node.got == ["holder", "chat", "a", "b"]
    assert not node.worker.batcher.seats.claims
    for name in ("chat", "a", "b"):
        await node.end(name)
    assert node.worker.batcher.pool.usage()["held"] == 0


async def test_an_interactive_reservation_gets_the_blocks_of_a_batch_stream():
    node = Node()
    stream, batcher = request("stream", blocks=7), node.worker.batcher
    batcher.reserve(0.0, stream)
    batcher.arrived(0.0, stream, 5)
    batcher.commit(0.0, batcher.schedule(0.0), [(6,)])
    node.ask(request("chat", "interactive", blocks=3))
    await asyncio.sleep(0.01)
    assert node.got == [] and stream.num_preemptions == 0
    step = batcher.schedule(time.monotonic())
    assert stream.num_preemptions == 1, "the next step makes room"
    assert step is None or all(row.request is not stream for row in step.rows)
    async with asyncio.timeout(10):
        await node.tasks[0]
    await node.end("chat")


async def test_a_request_that_can_have_no_token_here_is_not_taken_over():
    """The prefill node tells its acceptor, which would wait for that token until the deadline."""
    node = Node(num_blocks=16)
    one = node.ask(request("long", blocks=15))  # 60 tokens
    await asyncio.sleep(0)
    assert node.got == ["long"]
    node.worker.batcher.max_model_len = 61
    with pytest.raises(RemoteError, match="before a token: length"):
        node.incoming.arrive("long", 5)
    assert one.finished and not node.worker.batcher.requests
    assert node.worker.batcher.pool.references() == {"request": 0, "transfer": 0}
