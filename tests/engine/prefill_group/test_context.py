"""Nodes that divide the tokens of prompts: real workers in one process, whose model only checks the KV it sees."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.emissions import Emission
from engine.core.worker import Reuse, Worker
from engine.handoff.reuse import Publisher
from engine.model.decoder import Between
from engine.prefill_group.members import Members
from engine.prefill_group.messages import Place
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled
from engine.step.request import Request
from net.errors import RemoteError
from net.metrics.events import Metrics

LAYERS, SIZE, TOKENS = 3, 4, 90
ROOT = root_key("toy", BlockGeometry(LAYERS, 1, 2, SIZE, "float32"))


class CheckingRunner:
    """Writes KV that depends on the token, its position and the layer, and reads all KV that attention would read."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.kv_pool = torch.full((blocks, LAYERS, 2, 1, SIZE, 2), torch.nan)
        self.block_size = SIZE
        config = SimpleNamespace(num_layers=LAYERS)
        self.model, self.why_whole = SimpleNamespace(config=config), None
        self.losses: dict[int, Any] = {}
        self.prompts: dict[int, list[int]] = {}  # first token -> the prompt
        self.ends: list[int] = []  # of the rows of all steps
        self.between = 0  # steps that ended between two layers
        self.ahead: dict[int, Any] = {}
        self.go_on = threading.Event()  # parts stay in a step behind their first layer until it is set
        self.go_on.set()
        self._random = random.Random(seed)

    def step(self, rows: Sequence[Any], on_layer: Any = None, before_layer: Any = None) -> list[list[Sampled]]:
        self.ends += [row.start + len(row.token_ids) for row in rows]
        for layer in range(LAYERS):
            time.sleep(self._random.random() * 2e-3)
            for row in rows:
                self._check(row, layer)
        return [[Sampled(7)] if row.sample else [] for row in rows]

    def step_part(
        self, row: Any, layers: range, entering: Any, on_layer: Any, goes_on: Any
    ) -> tuple[Between | None, list[Sampled]]:
        assert (entering is None and layers == range(LAYERS)) or entering.layer == layers.start
        attended, end = entering is not None and entering.attended, row.start + len(row.token_ids)
        for layer in layers:
            if layer:
                self.go_on.wait()
            if not attended:
                time.sleep(self._random.random() * 1e-3)
                if not goes_on(layer):
                    self.between += 1
                    return Between(layer, self.kv_pool, self.kv_pool, attended=False), []
                self._check(row, layer)
                on_layer(layer)
            time.sleep(self._random.random() * 1e-3)
            if not goes_on(layer):
                self.between += 1
                return Between(layer, self.kv_pool, self.kv_pool, attended=True), []
            attended = False
        self.ends.append(end)
        return None, [Sampled(7)] if row.sample else []

    def _check(self, row: Any, layer: int) -> None:
        end = row.start + len(row.token_ids)
        prompt = torch.tensor(self.prompts[row.token_ids[0] // 1000][:end])
        where = torch.arange(end)
        blocks = torch.tensor(list(row.block_ids))[where // SIZE]
        wanted = prompt * 10.0 + layer + where / 1000
        new = where >= row.start
        self.kv_pool[blocks[new], layer, :, 0, where[new] % SIZE] = wanted[new, None, None].expand(-1, 2, 2)
        seen = self.kv_pool[blocks, layer, :, 0, where % SIZE]
        assert torch.equal(seen, wanted[:, None, None].expand(-1, 2, 2)), "KV of another node is missing"


class Net:
    """Channels of several nodes in one process; messages take as long as they like, in order from each to each."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeChannel] = {}


class NodeChannel:
    def __init__(self, net: Net, node_id: str) -> None:
        self.node_id, self._net, self._handlers = node_id, net, dict[str, Any]()
        self._tasks: set[asyncio.Task[Any]] = set()
        net.nodes[node_id] = self

    def handle(self, kind: str, handler: Any) -> None:
        self._handlers[kind] = handler

    def _run(self, peer: str, kind: str, body: Any, data: Sequence[Any]) -> asyncio.Task[Any]:
        whole = memoryview(bytearray(b"".join(data)))
        task = asyncio.ensure_future(self._handlers[kind](peer, body, whole))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def post(self, peer: str, kind: str, body: Any, data: Sequence[Any] = ()) -> None:
        self._net.nodes[peer]._run(self.node_id, kind, body, data)

    async def call(self, peer: str, kind: str, body: Any, data: Sequence[Any] = (), timeout_s: float = 10.0) -> Any:
        return await asyncio.wait_for(self._net.nodes[peer]._run(self.node_id, kind, body, data), timeout_s)


class NoPrefix:
    async def load(self, request: Request) -> None:
        pass


class Node:
    def __init__(self, net: Net, name: str, seed: int, blocks: int = 200) -> None:
        self.runner, metrics = CheckingRunner(seed, blocks), Metrics("m", name)
        pool = BlockPool(blocks)
        batcher = Batcher(pool, SIZE, 4, 12, 1000, {0})
        reuse = Reuse(NoPrefix(), Publisher(pool, None, metrics))
        self.worker = Worker(batcher, self.runner, reuse, StepCosts(), metrics)  # type: ignore[arg-type]
        self.members = Members(NodeChannel(net, name), self.worker, metrics, self._computed)  # type: ignore[arg-type]
        self.ended: dict[str, str | None] = {}
        self.worker.start(self._emitted)

    def _computed(self, request: Request, error: str | None) -> None:
        self.members.end(request.request_id)
        self.ended[request.request_id] = error

    def _emitted(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            if emission.ends:
                self.members.end(emission.request.request_id)
                self.ended[emission.request.request_id] = emission.error

    def add(self, name: str, number: int, place: Place) -> Request:
        prompt = [1000 * number + i for i in range(TOKENS)]
        self.runner.prompts[number] = prompt
        request = Request(name, list(prompt), TOKENS, SamplingParams(temperature=0, max_tokens=4), 0.0, ROOT)
        request.handover, request.part = True, self.members.part_of(place)
        self.worker.add(request)
        self.members.add(request, place, None)
        return request

    def add_short(self, number: int) -> Request:
        prompt = [1000 * number + i for i in range(9)]
        self.runner.prompts[number] = prompt
        request = Request(f"s{number}", list(prompt), 9, SamplingParams(temperature=0, max_tokens=1), 0.0, ROOT)
        self.worker.add(request)
        return request

    def add_stream(self, number: int, count: int) -> Request:
        prompt = [1000 * number + i for i in range(9)]
        self.runner.prompts[number] = prompt + [7] * count
        params = SamplingParams(temperature=0, max_tokens=count)
        request = Request(f"s{number}", list(prompt), 9, params, 0.0, ROOT)
        self.worker.add(request)
        return request

    async def stop(self) -> None:
        await self.members.close()
        await self.worker.close()
        assert not len(self.members)

    async def close(self) -> None:
        await self.stop()
        self.worker.batcher.check_integrity()
        assert self.worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - conditions in many places
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("seed", range(3))
async def test_groups_in_any_order_see_all_kv_and_never_wait_in_a_circle(seed):
    chance, net = random.Random(seed), Net()
    nodes = {name: Node(net, name, seed * 10 + i) for i, name in enumerate("abc")}
    requests = []
    for number in range(1, 6):
        order = chance.sample("abc", chance.choice([2, 3, 3]))
        requests += [nodes[name].add(f"r{number}", number, Place(i, order)) for i, name in enumerate(order)]
    await until(lambda: sum(len(node.ended) for node in nodes.values()) == len(requests))
    assert all(error is None for node in nodes.values() for error in node.ended.values())
    assert {request.finish_reason for request in requests} == {"passed", "handover"}
    for node in nodes.values():
        await node.close()


async def test_streams_go_on_while_the_part_in_their_steps_waits_for_another_node():
    """That node has begun its chunk, and rests behind the first layer for as long as it likes."""
    net = Net()
    first, second = Node(net, "a", 1), Node(net, "b", 2)
    first.runner.go_on.clear()
    stream = second.add_stream(0, 400)
    await until(lambda: len(stream.output_ids) > 2)
    requests = [node.add("r1", 1, Place(i, ["a", "b"])) for i, node in enumerate((first, second))]
    waits = second.worker._model.inputs
    await until(lambda: "r1" in waits and waits["r1"].waited_s > 0)
    begun = len(stream.output_ids)
    await until(lambda: len(stream.output_ids) > begun + 3)
    first.runner.go_on.set()
    await until(lambda: len(first.ended) == len(second.ended) == 1 or stream.finished)
    await until(lambda: all(request.finished for request in requests) and stream.finished)
    for node in (first, second):
        await node.close()


@pytest.mark.parametrize("seed", range(3))
async def test_other_prompts_come_between_the_layers_of_all_groups(seed):
    """Also while a node waits in its step for another one. Nothing is lost, and no node waits in a circle."""
    chance, net = random.Random(seed), Net()
    nodes = {name: Node(net, name, seed * 10 + i) for i, name in enumerate("abc")}
    requests = []
    for number in range(1, 6):
        order = chance.sample("abc", chance.choice([2, 3, 3]))
        requests += [nodes[name].add(f"r{number}", number, Place(i, order)) for i, name in enumerate(order)]
    shorts = []
    while sum(len(node.ended) for node in nodes.values()) < len(requests) + len(shorts):
        if len(shorts) < 60:
            shorts.append(chance.choice(list(nodes.values())).add_short(100 + len(shorts)))
        await asyncio.sleep(0.004 * chance.random())
    assert all(error is None for node in nodes.values() for error in node.ended.values())
    assert {request.finish_reason for request in requests} == {"passed", "handover"}
    assert all(short.finish_reason == "length" for short in shorts)
    assert sum(node.runner.between for node in nodes.values()) > 5
    for node in nodes.values():
        await node.close()


async def test_what_a_node_computes_itself_is_news():
    """Its last chunk is nobody else's news, and may take longer than its patience."""
    net = Net()
    nodes = {name: Node(net, name, 9) for name in "ab"}
    context = nodes["b"].members._context
    events: list[str] = []
    give, news = context._give, context._news

    def given(*arguments: Any) -> None:
        events.append("own")
        give(*arguments)

    context._give, context._news = given, lambda member: (events.append("news"), news(member))  # type: ignore
    requests = [nodes[name].add("r1", 1, Place(i, list("ab"))) for i, name in enumerate("ab")]
    await until(lambda: all("r1" in node.ended for node in nodes.values()))
    assert all(request.finish_reason in ("passed", "handover") for request in requests)
    last = max(i for i, event in enumerate(events) if event == "own")
    assert events.count("own") == LAYERS * len(nodes["b"].runner.ends) and nodes["b"].runner.ends[-1] == TOKENS
    assert all(events[i + 1] == "news" for i in range(last + 1) if events[i] == "own"), events
    for node in nodes.values():
        await node.close()


async def test_a_node_that_sends_to_an_ended_request_fails_the_attempt():
    """The acceptor then ends it on all nodes; nobody waits inside a step any longer."""
    net = Net()
    nodes = {name: Node(net, name, 5) for name in "abc"}
    requests = {name: nodes[name].add("r1", 1, Place(i, list("abc"))) for i, name in enumerate("abc")}
    await until(lambda: requests["b"].num_computed > 0)
    nodes["b"].members.end("r1")  # as EngineService cancels it
    nodes["b"].worker.abort("r1")
    await until(lambda: "r1" in nodes["a"].ended)
    assert "the node of its group b failed" in (nodes["a"].ended["r1"] or "")
    nodes["c"].members.end("r1")
    nodes["c"].worker.abort("r1")
    assert all(request.finished for request in requests.values())
    for node in nodes.values():  # a running step keeps its blocks until it has ended
        await until(lambda pool=node.worker.batcher.pool: not pool.references()["request"])
        await node.close()


async def test_a_node_may_close_in_the_middle_of_a_step():
    net = Net()
    nodes = {name: Node(net, name, 6) for name in "ab"}
    requests = [nodes[name].add("r1", 1, Place(i, list("ab"))) for i, name in enumerate("ab")]
    await until(lambda: requests[1].num_computed > 0)
    for node in nodes.values():
        await asyncio.wait_for(node.stop(), 10)


async def test_too_few_tokens_for_the_group_end_the_attempt():
    net = Net()
    nodes = {name: Node(net, name, 7) for name in "ab"}
    for i, name in enumerate("ab"):
        node = nodes[name]
        node.runner.prompts[1] = [1000, 1001, 1002]
        request = Request("r", [1000, 1001, 1002], 3, SamplingParams(max_tokens=1), 0.0, ROOT)
        request.handover, request.part = True, node.members.part_of(Place(i, ["a", "b"]))
        node.worker.add(request)
        node.members.add(request, Place(i, ["a", "b"]), None)
    await until(lambda: "r" in nodes["a"].ended)
    assert "too few for 2 nodes" in (nodes["a"].ended["r"] or "")
    for node in nodes.values():
        await node.close()


def test_a_place_of_another_node_is_refused():
    async def check() -> None:
        node = Node(Net(), "a", 8)
        with pytest.raises(RemoteError, match="not for this node"):
            node.members.part_of(Place(1, ["a", "b"]))
        await node.close()

    asyncio.run(check())
