"""KV for a decode node whose blocks differ: its blocks at the end, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from attention.codes import pool_in
from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.pool.policies import policies
from engine.core.kv_ready import KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer
from engine.handoff import messages
from engine.handoff.converting import UNLIKE_REGION, Converted, Converter
from engine.handoff.pull import KvPull, PullOffer
from engine.handoff.push import Push
from engine.unlike.rows import copy_rows
from net.transfer.common.memory import Region
from net.transfer.common.spans import unpack_spans
from net.transfer.engine import TransferEngine
from tests.net.peers import channels

LAYERS, TOKENS = 3, 77
SPARE = 3
"""Blocks of each arena in which the prompt is not."""

JUNK = 0x55


class Side:
    """A node's arena."""

    def __init__(self, channel: Any, order: tuple[str, ...], dtype: str, size: int) -> None:
        self.channel, self.geometry = channel, BlockGeometry(LAYERS, 2, 16, size, dtype)
        self.blocks = -(-TOKENS // size)
        self.transfer = TransferEngine(channel, order)
        self.region = Region.shared("kv", (self.blocks + SPARE) * self.geometry.block_bytes)
        self.memory = torch.frombuffer(self.region.memory, dtype=torch.uint8)
        self.memory.fill_(JUNK)
        self.kv = pool_in(self.memory, self.geometry.shape, dtype)
        self.transfer.register(self.region)

    async def close(self) -> None:
        await self.transfer.close()
        del self.kv, self.memory
        self.region.close()


@asynccontextmanager
async def pair(order: tuple[str, ...], forms: tuple[tuple[str, int], tuple[str, int]], places: list[int]):
    """(prefill side, decode side)"""
    async with channels("p", "d") as (p_channel, d_channel):
        p, d = (Side(each, order, *form) for each, form in zip((p_channel, d_channel), forms, strict=True))
        writes = KvPull(d.transfer, "kv", d.geometry.block_bytes, "p", places)

        async def pull(peer, body, data):
            done = await writes.read(body["region"], unpack_spans(data), body["timeout_s"], body["encoded"])
            return {"nbytes": done.nbytes, "seconds": done.seconds, "transport": done.transport}

        d_channel.handle(messages.PULL, pull)
        try:
            yield p, d
        finally:
            await writes.stop()
            for side in (p, d):
                await side.close()


def mover_of(how: str, p: Side, target: KvTarget, converted: Converted) -> Any:
    if how == "pull":
        return PullOffer(p.channel, converted.region, "r", target, 30.0, encoded=False)
    return Push(p.transfer, converted.region, target, 30.0)


FORMS = [
    (("float32", 8), ("int8", 8)),
    (("int8", 8), ("float32", 8)),
    (("bfloat16", 8), ("float32", 8)),
    (("float32", 8), ("float32", 32)),
    (("int8", 32), ("int8", 8)),
    (("float32", 8), ("fp8", 32)),
    (("fp8", 32), ("bfloat16", 8)),
]


@pytest.mark.parametrize("overlap", ["layer", "chunk", "none"])
@pytest.mark.parametrize("how", ["push", "pull"])
@pytest.mark.parametrize("order", [("shm", "tcp"), ("tcp",)])
@pytest.mark.parametrize("forms", FORMS)
async def test_the_decode_node_has_the_blocks_that_it_would_have_made(forms, order, how, overlap):
    """In three chunks that end inside blocks of both nodes. The decode node had its first block already."""
    size = forms[1][1]
    count = -(-TOKENS // size)
    places = [(5 * i + 2) % (count + SPARE) for i in range(count)] if (count + SPARE) % 5 else [*range(1, count + 1)]
    async with pair(order, forms, places) as (p, d):
        pool = BlockPool(p.blocks + SPARE, policies["lru"]())
        here = pool.allocate(p.blocks)
        target = KvTarget("d", "kv", places, 1, d.transfer.epoch_of("p"), dtype=forms[1][0], block_size=size)
        converter = Converter(p.region, p.geometry, 9 * p.geometry.layer_bytes, p.transfer.register)
        converted = converter.onto(target)
        ready = KvReady(p.geometry, converted.target(TOKENS), TOKENS, overlap)
        transfer = KvTransfer("d", mover_of(how, p, target, converted), ready, pool, converted)
        x = torch.randn(LAYERS, 2, 2, TOKENS, 16, generator=torch.Generator().manual_seed(7))
        for start, end in ((0, 21), (21, 50), (50, TOKENS)):
            for layer in range(LAYERS):
                for token in range(start, end):
                    block, row = divmod(token, p.geometry.block_size)
                    copy_rows(x[layer], token, p.kv[here[block], layer], row, 1)
                transfer.layer_done(here, layer, start, end)
                await asyncio.sleep(0.001)
        report = await transfer.finish()
        wanted_memory = torch.full_like(d.memory, JUNK)
        wanted = pool_in(wanted_memory, d.geometry.shape, d.geometry.dtype)
        for token in range(size, TOKENS):
            (i, row), (j, at) = divmod(token, p.geometry.block_size), divmod(token, size)
            copy_rows(p.kv[here[i]], row, wanted[places[j]], at, 1)
        if p.geometry.block_size == size:  # whole blocks move, with what lies behind the last token
            last, room = places[-1], torch.full_like(d.memory[: d.geometry.block_bytes], JUNK)
            tail = pool_in(room, d.geometry.shape, d.geometry.dtype)
            copy_rows(d.kv[last], 0, tail[0], 0, TOKENS - (count - 1) * size)
            d.memory.view(-1, d.geometry.block_bytes)[last] = room
        assert torch.equal(d.memory, wanted_memory)
        assert report.transport == order[0]
        assert transfer.encoder is converted
        assert converted.notes(report)["form"] == f"{forms[1][0]}/{size}"
        assert converter.used == (forms[0][0] != forms[1][0]) == (converter.bytes_per_s > 0)
        pool.release(here)
        assert pool.usage()["held"] == 0
        if converter.used:
            p.transfer.unregister(UNLIKE_REGION)
        converter.close()
