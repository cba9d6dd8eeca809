"""Prompts move between nodes, and any node may pause at any moment for longer than every deadline.

Services, channels, transfer engines and sockets are real; the clock is simulated (tests/engine/stepped.py). No byte may
land in a free block or in a block of another request, every block must come back on both sides, and every request must
end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
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
from engine.handoff.messages import Abort, Prefill, Reserve, pack_request
from engine.handoff.outgoing import KvMoves
from engine.handoff.own_load import OwnLoad
from engine.handoff.rail_news import RailNews
from engine.handoff.service import EngineService
from engine.handoff.updates import Failed, HandedOver, decode_all
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import decode, encode
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.gossip.load_words import LoadWords
from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from sched.gossip.state import NodeRecord
from sched.rejection import OutputLengths, Rejection
from tests.engine.handoff.test_pull import PROMISE
from tests.engine.handoff.test_service import IdleWorker
from tests.engine.stepped import World

GEOMETRY = BlockGeometry(2, 2, 64, 16, "float32")
ROOT = root_key("toy", GEOMETRY)
BLOCKS = 16
TURN_BYTES = 8 << 10  # a layer of a block is copied in two turns, and a node can stop between them
STRIDE = 1024
PAUSES_S = (0.02, 0.3, 2.0, 12.0, 40.0, 150.0)
POISON = 0xEE
REQUESTS = 8
MAX_ATTEMPTS = 4
PATIENCE_S = 25.0  # of the acceptor, for a request
FOUND_DEAD_S = 6.0  # after this pause, other nodes may consider a node dead
ENDS = (PeerLost, PeerRefused, RemoteError, TimeoutError)


class WokenWorker(IdleWorker):
    """Computes when there may be something to compute."""

    def __init__(self, batcher: Batcher) -> None:
        super().__init__(batcher)
        self.woken = asyncio.Event()

    def add(self, request: Request, transfer: Any = None) -> None:
        super().add(request, transfer)
        self.wake()

    def wake(self) -> None:
        self.woken.set()


class Node:
    """An engine node without a model."""

    def __init__(self, world: World, name: str, transport: str, how: str) -> None:
        self.world, self.name, self.transport, self.how = world, name, transport, how
        self.loop = world.add(name)

    async def start(self) -> tuple[str, int]:
        self.channel = Channel(self.name, {})
        options = {"tcp": {"busy_poll_us": 0}}  # which reads the clock until it has moved
        self.transfer = TransferEngine(self.channel, [self.transport], options)
        self.region = Region.shared("kv", BLOCKS * GEOMETRY.block_bytes)
        self.transfer.register(self.region)
        self.pool = BlockPool(BLOCKS)
        self.worker = WokenWorker(Batcher(self.pool, GEOMETRY.block_size, 4, 256, 4096, {0}))
        self.words = LoadWords(self.channel, self.transfer)
        idle = SimpleNamespace(
            record=NodeRecord, running_soon=lambda seconds: 0, step_s=lambda batch: 0.01, lengths=OutputLengths()
        )
        load = OwnLoad(self.name, idle, self.words, Rejection())
        metrics = Metrics("m", self.name)
        moves = KvMoves(GEOMETRY, RailNews(self.transfer), self.how)
        self.service = EngineService(self.channel, self.transfer, self.worker, moves, 8, load, metrics)
        return await self.channel.start("127.0.0.1")

    async def close(self) -> None:
        await self.service.close()
        await self.words.close()
        await self.transfer.close()
        await self.channel.close()
        self.region.close()

    def block(self, block_id: int) -> memoryview:
        return self.region.memory[block_id * GEOMETRY.block_bytes : (block_id + 1) * GEOMETRY.block_bytes]

    def is_free(self, block_id: int) -> bool:
        return not (self.pool._request_refs[block_id] or self.pool._transfer_refs[block_id])

    def idle(self) -> bool:
        self.pool.check_integrity()
        self.pool.check_transfer_owners([*self.service.held_blocks(), *self.of_transfers()])
        self.pool.check_request_owners(self.worker.batcher.held_blocks())
        return self.pool.references() == {"request": 0, "transfer": 0} and not any(self.service.held().values())

    def of_transfers(self) -> list[int]:
        return [block for one in self.worker.transfers.values() for block in one.held_blocks()]

    async def compute(self) -> None:
        """The loop of a prefill node: layers of one prompt after the other, with time between them."""
        while True:
            step = self.worker.batcher.schedule(self.world.now)
            if step is None:
                self.worker.woken.clear()
                await self.worker.woken.wait()
                continue
            for request in [row.request for row in step.rows]:
                for block_id in request.block_ids:
                    self.block(block_id)[:] = bytes([mark_of(request.request_id)]) * GEOMETRY.block_bytes
            for layer in range(GEOMETRY.num_layers):
                await asyncio.sleep(0.02)
                for one in step.rows:
                    if (transfer := self.worker.transfers.get(one.request.request_id)) is not None:
                        transfer.layer_done(one.request.block_ids, layer, one.start, one.start + one.num_tokens)
            done = self.worker.batcher.commit(
                self.world.now, step, [(5,) if one.samples else None for one in step.rows]
            )
            self.service.on_emissions([Emission(request, 5) for request, _, _ in done.emitted])


def mark_of(request_id: str) -> int:
    """What a request's KV consists of."""
    return 1 + int(request_id[1:])


class FreeBlocks:
    """Nothing may land in them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.poisoned: set[int] = set()

    def look(self) -> None:
        for block_id in range(BLOCKS):
            if not self.node.is_free(block_id):
                self.poisoned.discard(block_id)
                continue
            if block_id in self.poisoned:
                assert set(self.node.block(block_id)[::STRIDE]) == {POISON}, f"a write into the free block {block_id}"
            else:
                self.node.block(block_id)[:] = bytes([POISON]) * GEOMETRY.block_bytes
                self.poisoned.add(block_id)


class Acceptor:
    def __init__(self, world: World, decode: Node) -> None:
        self.world, self.decode = world, decode
        self.loop = world.add("a")
        self.ends: dict[str, asyncio.Event] = {}
        self.handed_over = 0

    async def start(self) -> tuple[str, int]:
        self.channel = Channel("a", {})
        self.channel.handle(messages.TOKENS, self.on_tokens)
        return await self.channel.start("127.0.0.1")

    async def on_tokens(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        for request_id, update in decode_all(body):
            if isinstance(update, HandedOver | Failed) and request_id in self.ends:
                self.handed_over += isinstance(update, HandedOver)
                self.ends[request_id].set()

    async def run(self, number: int) -> None:
        """One request: reserved, computed, handed over, decoded for a while; or given up after PATIENCE_S."""
        request_id = f"r{number}"
        count = GEOMETRY.block_size * (1 + number % 4)
        ids = [1 + number * 1000 + i for i in range(count)]
        request = Request(request_id, ids, count, SamplingParams(max_tokens=4), 0.0, ROOT)
        wire, data = pack_request(request)
        self.ends[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(PATIENCE_S):
                reserve = encode(Reserve(wire, ["p"]))
                reply, _ = await self.channel.call("d", messages.RESERVE, reserve, data, PATIENCE_S)
                prefill = encode(Prefill(wire, PROMISE, decode(KvTarget, reply)))
                await self.channel.call("p", messages.PREFILL, prefill, data, PATIENCE_S)
                await self.ends[request_id].wait()
                await asyncio.sleep(0.5)
        except ENDS:
            pass
        for node in ("p", "d"):
            with suppress(*ENDS):
                self.channel.post(node, messages.ABORT, encode(Abort([request_id])))


def arrived_whole(decode: Node) -> None:
    """At its handover a request's blocks are its own, and stay so while it decodes."""
    for request in decode.worker.batcher.requests.values():
        if request.handed_over:
            for block_id in request.block_ids[: -(-request.num_prompt_tokens // GEOMETRY.block_size)]:
                found = set(decode.block(block_id)[::STRIDE])
                assert found == {mark_of(request.request_id)}, f"{request.request_id}: {found}"


@pytest.mark.parametrize("how", ["push", "pull"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("seed", range(6))
def test_no_pause_frees_a_block_too_early_or_never(monkeypatch, transport, how, seed):
    print(f"seed {seed}")
    for module in ("net.transfer.shm.transport", "net.transfer.common.copying"):
        monkeypatch.setattr(f"{module}.INLINE_MAX", TURN_BYTES)
    world = World(seed, monkeypatch)
    rng = world.rng
    p, d = (Node(world, name, transport, how) for name in ("p", "d"))
    a = Acceptor(world, d)
    addresses = {name: world.wait(name, node.start()) for name, node in (("p", p), ("d", d), ("a", a))}
    nodes = {"p": p, "d": d, "a": a}
    for node in nodes.values():
        for name, address in addresses.items():
            if nodes[name] is not node:
                node.channel.introduce(name, address)
    free = FreeBlocks(d)

    def after_step() -> None:
        free.look()
        arrived_whole(d)

    world.after_step = after_step
    computing = world.start("p", p.compute())
    works = []

    def begin(number: int) -> None:
        works.append(world.start("a", a.run(number)))

    def stand_still(name: str) -> None:
        seconds = rng.choice(PAUSES_S)
        world.pause(name, seconds)
        for other, node in nodes.items():
            if other != name and seconds > FOUND_DEAD_S and rng.random() < 0.6:
                drop = partial(node.loop.call_soon, node.channel.drop, name, "gossip says so")
                world.at(world.now + FOUND_DEAD_S, drop)

    begun = world.now
    for number in range(REQUESTS):
        world.at(begun + rng.uniform(0.0, 40.0), lambda number=number: begin(number))
    for _ in range(6):
        name = rng.choice(["p", "p", "d", "a"])
        # Between two turns of the loops as well as between two messages.
        world.at(begun + rng.uniform(0.0, 60.0), lambda name=name: name in world.still or stand_still(name))
    world.until(lambda: len(works) == REQUESTS and all(work.done() for work in works), 1200.0)
    world.until(lambda: not world.still and p.idle() and d.idle(), 1200.0)
    for work in works:
        work.result()

    async def a_new_one() -> None:
        """A connection may still be found broken: then the next attempt has another."""
        before = a.handed_over
        for attempt in range(MAX_ATTEMPTS):
            await a.run(REQUESTS + attempt)
            if a.handed_over > before:
                return
        raise AssertionError("the nodes do not work together again")

    world.wait("a", a_new_one())
    world.until(lambda: p.idle() and d.idle(), 300.0)
    world.after_step = lambda: None
    computing.cancel()
    for name, node in (("p", p), ("d", d)):
        world.wait(name, node.close())
    world.wait("a", a.channel.close())
    world.close()
