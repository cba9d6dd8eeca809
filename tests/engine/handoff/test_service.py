"""Who may use whose blocks when: the fence between a decode node and the push that still writes to it."""

from __future__ import annotations

import asyncio
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
from engine.handoff.messages import Abort, Fence, Prefill, Promise, Reserve, pack_request
from engine.handoff.outgoing import KvMoves
from engine.handoff.own_load import OwnLoad
from engine.handoff.rail_news import RailNews
from engine.handoff.service import EngineService
from engine.handoff.updates import Token, decode_all
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from engine.step.step import Step
from net.bodies import answered, encode
from net.errors import RemoteError
from net.metrics.events import Metrics
from sched.gossip.state import NodeRecord
from sched.rejection import OutputLengths, Rejection

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
ROOT = root_key("toy", GEOMETRY)


PROMISE = Promise(claim=0, wait_s=0.0, ttft_s=1.0, redirects_left=2)


def prefill(request: Request, target: KvTarget | None = None) -> tuple[dict[str, Any], memoryview]:
    """The body and the data of a PREFILL."""
    wire, data = pack_request(request)
    return encode(Prefill(wire, PROMISE, target)), memoryview(data[0])


def moves(transfer: Any, how: str = "push", prefills: bool = False) -> KvMoves:
    return KvMoves(GEOMETRY, RailNews(transfer), how, prefills=prefills)


def idle_load() -> OwnLoad:
    load = SimpleNamespace(record=NodeRecord, lengths=OutputLengths())
    return OwnLoad("n", load, SimpleNamespace(outstanding=0), Rejection())


class SlowTransfer:
    """Writes that land only when told to."""

    def __init__(self) -> None:
        self.landed = asyncio.Event()
        self.in_flight = 0

    async def submit(self, *_: Any, epoch: str) -> Any:
        self.in_flight += 1
        await self.landed.wait()
        self.in_flight -= 1
        return SimpleNamespace(nbytes=64, seconds=0.001, transport="slow")


class Wires:
    """A channel that keeps the handlers and remembers what was sent."""

    def __init__(self, node_id: str = "n") -> None:
        self.node_id = node_id
        self.handlers: dict[str, Any] = {}
        self.posted: list[tuple[str, str, dict]] = []

    def handle(self, kind, handler):
        self.handlers[kind] = handler

    def on_lost(self, callback):
        self.lost = callback

    on_closed = on_lost

    def post(self, peer, kind, body, data=()):
        self.posted.append((peer, kind, body))

    async def call(self, peer, kind, body, data=(), timeout_s=10.0):
        return {}, memoryview(b"")


class IdleWorker:
    """The part of Worker that the service uses, without a model."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.transfers: dict[str, Any] = {}

    def add(self, request, transfer=None):
        self.batcher.add(0.0, request)
        if transfer:
            self.transfers[request.request_id] = transfer

    def abort(self, request_id):
        return self.batcher.abort(0.0, request_id)

    def check(self, request=None) -> None:
        """It lives, and has the weights of every request."""

    def follow_parts(self, parts):
        return {}

    def take_transfer(self, request_id):
        return self.transfers.pop(request_id, None)

    def wake(self):
        pass


async def test_a_fence_waits_for_the_push_of_a_request_that_is_being_handed_over():
    channel, transfer = Wires("p"), SlowTransfer()
    worker = IdleWorker(Batcher(BlockPool(16), 4, 4, 64, 1000, {0}))
    service = EngineService(channel, transfer, worker, moves(transfer), 8, idle_load(), Metrics("m", "p"))
    request = Request("r", [1] * 8, 8, SamplingParams(max_tokens=4), 0.0, ROOT)
    target = KvTarget("d", "kv", [3, 4], first_missing=0, epoch="")
    await channel.handlers[messages.PREFILL]("a", *prefill(request, target))
    step = worker.batcher.schedule(0.0)
    for layer in range(2):
        worker.transfers["r"].layer_done(step.rows[0].request.block_ids, layer, 0, 8)
    await asyncio.sleep(0)
    done = worker.batcher.commit(0.0, step, [(5,)])
    service.on_emissions([Emission(done.emitted[0][0], 5)])
    fence = asyncio.create_task(channel.handlers[messages.FENCE]("d", encode(Fence("r")), memoryview(b"")))
    await asyncio.sleep(0.05)
    assert transfer.in_flight == 1 and not fence.done()  # the decode node may not have its blocks back yet
    transfer.landed.set()
    await asyncio.wait_for(fence, 5)
    assert transfer.in_flight == 0
    await asyncio.sleep(0.05)
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}
    assert service.held() == {"requests": 0, "incoming": 0, "stages": 0, "leaving": 0, "lent": 0, "acceptors": 0}
    await service.close()


async def test_tokens_of_one_step_are_numbered_and_only_the_last_one_ends_the_request():
    """An accepted draft: three tokens of one request in one step, the third is its end."""
    channel, transfer = Wires("d"), SlowTransfer()
    worker = IdleWorker(Batcher(BlockPool(16), 4, 4, 64, 1000, {0}))
    service = EngineService(channel, transfer, worker, moves(transfer), 8, idle_load(), Metrics("m", "d"))
    request = Request("r", [1] * 5, 5, SamplingParams(max_tokens=3), 0.0, ROOT)
    await channel.handlers[messages.PREFILL]("a", *prefill(request))
    step = worker.batcher.schedule(0.0)
    done = worker.batcher.commit(0.0, step, [(5, 6, 7)])
    (owned, _, kept) = done.emitted[0]
    service.on_emissions([Emission(owned, 5 + i, num_behind=kept - 1 - i) for i in range(kept)])
    first, second, last = [update for _, _, body in channel.posted for _, update in decode_all(body)]
    assert (first.index, first.token_id, first.finish) == (0, 5, None) and first.report is not None
    assert second == Token(1, 6)
    assert (last.index, last.token_id, last.finish) == (2, 7, "length") and last.report is not None
    assert service.held()["acceptors"] == 0
    await service.close()


async def test_a_node_refuses_a_prompt_that_fills_its_context():
    channel, transfer = Wires("n"), SlowTransfer()
    transfer.epoch_of = lambda node: ""
    worker = IdleWorker(Batcher(BlockPool(16), 4, 4, 64, 10, {0}))
    service = EngineService(channel, transfer, worker, moves(transfer), 8, idle_load(), Metrics("m", "n"))

    def request(tokens: int, max_tokens: int) -> Request:
        name = f"{tokens} {max_tokens}"
        return Request(name, [1] * tokens, tokens, SamplingParams(max_tokens=max_tokens), 0.0, ROOT)

    async def reserve(one: Request) -> None:
        wire, data = pack_request(one)
        await channel.handlers[messages.RESERVE]("a", encode(Reserve(wire, ["p"])), memoryview(data[0]))

    with pytest.raises(RemoteError, match="n takes 10 tokens, the request has 9") as refused:
        await reserve(request(9, 5))
    assert refused.value.code == "too_long"
    await reserve(request(9, 1))  # the prefill node makes its only token
    await reserve(request(8, 5))
    with pytest.raises(RemoteError, match="n takes 10 tokens, the request has 11"):
        await channel.handlers[messages.PREFILL]("a", *prefill(request(11, 5)))
    await channel.handlers[messages.PREFILL]("a", *prefill(request(10, 5)))
    assert list(worker.batcher.requests) == ["9 1", "8 5", "10 5"]
    await service.close()


@pytest.mark.parametrize("mixed", [True, False])
async def test_prompts_that_hold_blocks_on_each_others_nodes_do_not_wait_for_them(mixed):
    """Each of two nodes decodes what the other one is to compute, and has not enough blocks for both. If the decode
    nodes computed no prompts, nobody there would wait for these blocks."""
    nodes, requests = [], []
    for name in ("x", "y"):
        channel, transfer = Wires(name), SlowTransfer()
        transfer.epoch_of = lambda node: ""
        worker = IdleWorker(Batcher(BlockPool(15), 4, 4, 64, 1000, {0}))
        how = moves(transfer, prefills=mixed)
        service = EngineService(channel, transfer, worker, how, 8, idle_load(), Metrics("m", name))
        nodes.append((name, channel, worker, service))
        requests.append(Request(f"for {name}", [ord(name) + i for i in range(32)], 32, SamplingParams(), 0.0, ROOT))
    targets = []
    for (_, channel, _, _), (other, *_), request in zip(nodes, reversed(nodes), requests, strict=True):
        wire, data = pack_request(request)
        reply = await channel.handlers[messages.RESERVE]("a", encode(Reserve(wire, [other])), memoryview(data[0]))
        targets.append(answered(KvTarget, reply))
    assert [target.prefills for target in targets] == [mixed, mixed]
    for (_, channel, worker, _), request, target in zip(reversed(nodes), requests, targets, strict=True):
        await channel.handlers[messages.PREFILL]("a", *prefill(request, target))
        assert worker.batcher.schedule(0.0) is None
        stuck = [(one.request_id, reason) for one, reason in worker.batcher.stuck()]
        reason = "KV that other nodes write leaves 7 blocks of 4 tokens: it needs 8"
        assert stuck == [(request.request_id, reason)] * mixed
    for *_, service in nodes:
        await service.close()


async def test_a_reservation_whose_abort_comes_while_it_gets_its_blocks_holds_none():
    """Nobody would write to these blocks, and nobody would end the reservation: its acceptor knows it no more."""
    channel, transfer = Wires("d"), SlowTransfer()
    transfer.epoch_of = lambda node: ""
    worker = IdleWorker(Batcher(BlockPool(4), 4, 4, 64, 1000, {0}))
    service = EngineService(channel, transfer, worker, moves(transfer), 8, idle_load(), Metrics("m", "d"))
    holder, late = (Request(name, [1] * 16, 16, SamplingParams(), 0.0, ROOT) for name in ("holder", "late"))
    await channel.handlers[messages.PREFILL]("a", *prefill(holder))
    assert worker.batcher.schedule(0.0) is not None
    worker.batcher.gave_way(0.0, Step([]))
    wire, data = pack_request(late)
    asked = channel.handlers[messages.RESERVE]("a", encode(Reserve(wire, ["p"])), memoryview(data[0]))
    reserving = asyncio.create_task(asked)
    await asyncio.sleep(0)
    worker.abort("holder")
    service.blocks_freed()  # its turn: it goes on in the next turn of the loop, behind the abort
    await channel.handlers[messages.ABORT]("a", encode(Abort(["late"])), memoryview(b""))
    with pytest.raises(RemoteError, match="cancelled before it had blocks"):
        await reserving
    await asyncio.sleep(0)
    assert service.held()["incoming"] == 0 and not worker.batcher.requests
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}
    await service.close()
