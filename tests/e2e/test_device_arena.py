"""Serving from KV arenas that the CPU cannot address, with recorded steps: the control flow of --device cuda.

The nodes run in this process. Their arenas are devices whose copies come late (tests/net/fake_device.py), their graphs
are replayed by computing again; everything else is what a node does. Tokens are those of a plain node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch

import engine.loading.load_model
from engine.checkpoint.model_source import describe
from engine.config.flags import parse
from engine.config.machine import survey
from engine.config.resolve import resolve
from engine.core.kv_ready import KV_REGION
from engine.node.node import Node
from engine.node.phases import Phases
from net.channel.sockets import listen
from net.http.client import fetch_cluster
from net.transfer.device.staging import DeviceRegion
from tests.engine.model.test_graphs import CpuRecorder
from tests.net.fake_device import FakeDevice

KV_BLOCKS = 12  # of the prefill node: a second prompt evicts the first
PROMPTS = [[5 + (i * 7 + j * 11) % 1000 for j in range(100)] for i in range(2)]
TOKENS = 8


class Devices:
    """Stands in for the functions of engine/loading/load_model.py that know CUDA."""

    def __init__(self) -> None:
        self.made: list[FakeDevice] = []
        self.recorders: list[CpuRecorder] = []

    def arena(self, config: Any, geometry: Any) -> tuple[DeviceRegion, torch.Tensor]:
        device = FakeDevice(config.kv_cache_bytes, seed=len(self.made))
        self.made.append(device)
        kv = torch.frombuffer(device.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        return DeviceRegion(KV_REGION, device), kv

    def record(self, config: Any, runner: Any) -> None:
        self.recorders.append(CpuRecorder())
        runner.record(self.recorders[-1], config.max_num_seqs, config.max_model_len)

    def close(self) -> None:
        for device in self.made:
            assert device.pinned == []
            device.close()


@asynccontextmanager
async def node(flags: Sequence[str], *own: str, join: Node | None = None) -> AsyncIterator[Node]:
    config = parse([*flags, "--num-threads", "1", "--port", "0", "--attention-backend", "torch", *own])
    door = None if join is None else join.http_address
    cluster = None if door is None else await fetch_cluster(door, None)
    source = describe(config.model, config.load_format, config.seed)
    config = resolve(config, source.config, survey(look_for_gpu=False), "x", cluster)
    with listen(config.host, config.port) as http_socket:
        one = Node(config, source, http_socket, cluster, Phases(time.monotonic()))
        try:
            await one.start()
            yield one
        finally:
            await one.stop()


async def ask(session: aiohttp.ClientSession, to: Node, prompt: list[int]) -> tuple[str, int]:
    """(text of the answer, prompt tokens found in a cache)."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with session.post(f"http://{to.http_address}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


async def plain_answers(flags: Sequence[str]) -> list[str]:
    async with node(flags, "--node-id", "plain") as alone, aiohttp.ClientSession() as session:
        return [(await ask(session, alone, prompt))[0] for prompt in PROMPTS]


async def settled(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def device_answers(flags: Sequence[str], prefill: Sequence[str], transfer: str) -> list[tuple[str, int]]:
    more = ["--prefix-fetch", "always", "--kv-transfer", transfer]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            node(flags, "--role", "store", "--node-id", "s", "--dram-bytes", "32M", *more)
        )
        first = await stack.enter_async_context(
            node(flags, "--role", "prefill", "--node-id", "p", *prefill, *more, join=store)
        )
        second = await stack.enter_async_context(node(flags, "--role", "decode", "--node-id", "d", *more, join=store))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engine = first.engine
        assert engine is not None and second.engine is not None
        await settled(lambda: {m.node_id for m in second.gossip.members} == {"s", "p", "d"})
        answers = []
        for prompt in [*PROMPTS, PROMPTS[0]]:  # the last one comes back from the pool
            answers.append(await ask(session, second, prompt))
            await settled(lambda: engine.publisher.backlog == 0)
        moved = {path["transport"] for path in first.transfer.snapshot() if path["peer"] == "d"}
        assert moved == {"shm"}, moved
        for one in (first.engine, second.engine):
            await settled(lambda one=one: not any(one.service.held().values()))
            assert one.state()["integrity"] is None
        return answers


@pytest.mark.parametrize("transfer", ["push", "pull"])
def test_tokens_are_those_of_a_plain_node(tiny_model, monkeypatch, transfer: str) -> None:
    flags = [*tiny_model, "--served-model-name", "tiny", "--max-model-len", "128", "--max-num-seqs", "4"]
    expected = asyncio.run(plain_answers([*flags, "--kv-cache-bytes", "4M"]))
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head size, float32
    devices = Devices()
    monkeypatch.setattr(engine.loading.load_model, "arena", devices.arena)
    monkeypatch.setattr(engine.loading.load_model, "record_graphs", devices.record)
    small = ["--kv-cache-bytes", str(KV_BLOCKS * block_bytes)]
    answers = asyncio.run(device_answers([*flags, "--kv-cache-bytes", "4M"], small, transfer))
    devices.close()
    assert [text for text, _ in answers] == [*expected, expected[0]]
    assert [cached for _, cached in answers] == [0, 0, 96], "the first prompt's blocks came back from the pool"
    assert len(devices.made) == 2 and all(device.log for device in devices.made)
    assert devices.recorders[1].replays >= 3 * (TOKENS - 1), "decodes are replayed"
