"""Encoded blocks that come layer by layer, over real sockets from real homes: the bytes of a whole load, in the order
of the layers, and nothing of a block that was damaged on its way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cache.arena import Arena
from cache.block import BlockGeometry
from cache.homes.rendezvous import equal_members
from cache.pool.policy import PLAIN
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from engine.node.engine import layers_of, pool_blocks
from engine.pooled.encoded_blocks import EncodedBlocks
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

LAYERS, BLOCKS, COUNT = 5, 40, 12
KEYS = [bytes([i]) * 16 for i in range(COUNT)]
HERE, WHOLE, LAYERED = range(COUNT), range(COUNT, 2 * COUNT), range(3 * COUNT - 1, 2 * COUNT - 1, -1)


def geometry_of(pool_dtype: str) -> BlockGeometry:
    return BlockGeometry(LAYERS, 2, 16, 16, "bfloat16", pool_dtype)


class Node:
    """A home and an engine's arena."""

    def __init__(
        self, name: str, order: tuple[str, ...], geometry: BlockGeometry, staging_blocks: int, rounding: Any = None
    ) -> None:
        self.name, self.geometry = name, geometry
        self.channel = Channel(name, {}, lambda hello: None)
        self.transfer = TransferEngine(self.channel, order)
        self.dram = Region.shared(f"{name}-dram", 2 * COUNT * geometry.pool_bytes)
        self.local = LocalStore(Arena(self.dram, geometry.pool_bytes), None)
        members = equal_members(["a", "b"])
        self.store = Store(
            name,
            self.channel,
            self.transfer,
            self.local,
            lambda: members,
            StoreOptions(block_bytes=geometry.pool_bytes),
        )
        self.arena = Region.shared("kv", BLOCKS * geometry.block_bytes)
        self.store.attach(self.arena)
        self.kv = torch.frombuffer(self.arena.memory, dtype=torch.bfloat16).view(-1, *geometry.shape)
        staging_bytes = staging_blocks * geometry.encoded_bytes
        self.pool: Any = pool_blocks(self.store, self.arena, geometry, staging_bytes, None, rounding)

    async def close(self) -> None:
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        self.local.check_integrity()
        assert self.local.stats()["dram"]["held"] == 0
        self.pool.close()
        del self.kv
        self.arena.close()
        self.dram.close()


@dataclass
class Pair:
    """`b` has nothing yet; `a` has put blocks of random KV, whose homes are both."""

    a: Node
    b: Node


@pytest.fixture
async def pair(request):
    """Parameters: (transports, pool dtype, blocks that fit into a staging area)."""
    order, pool_dtype, staging_blocks = getattr(request, "param", (("tcp",), "int8", 16))
    geometry = geometry_of(pool_dtype)
    nodes = [Node(name, order, geometry, staging_blocks) for name in ("a", "b")]
    a, b = nodes
    for node in nodes:
        node.address = await node.channel.start("127.0.0.1", 0)
    a.channel.introduce("b", b.address)
    b.channel.introduce("a", a.address)
    a.kv[:COUNT] = torch.randn(COUNT, *geometry.shape, generator=torch.Generator().manual_seed(4))
    assert await a.pool.put(KEYS, HERE, [PLAIN] * COUNT) == COUNT
    yield Pair(a, b)
    for node in nodes:
        await node.close()


EVERY_WAY = [
    (order, dtype, staging)
    for order in (("shm", "tcp"), ("tcp",))
    for dtype, staging in (("int8", 16), ("fp8", 16), ("int8", 10), ("int4", 16), ("bfloat16", 16))
]


@pytest.mark.parametrize("pair", EVERY_WAY, indirect=True, ids=str)
async def test_layer_by_layer_the_bytes_are_those_of_a_whole_load(pair):
    """Blocks in another order than they lie, and a staging area that has room for just two layers of each (10)."""
    b = pair.b
    assert (await b.pool.get(KEYS, WHOLE)).blocks == COUNT
    whole = b.kv[list(WHOLE)]
    b.kv[list(LAYERED)] = torch.nan
    seen = []

    def landed(layer: int) -> None:
        seen.append(layer)
        assert torch.equal(b.kv[list(LAYERED), : layer + 1], whole[:, : layer + 1]), "usable from now on"

    async with b.pool.layers(KEYS, LAYERED) as found:
        assert await found.read(landed)
        assert sum(found.pinned.sources.values()) == COUNT
        assert sum(found.pinned.transports.values()) == COUNT * b.geometry.pool_bytes, "as they lie in the pool"
    assert seen == list(range(LAYERS))
    assert torch.equal(b.kv[list(LAYERED)], whole)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("what", ["code", "scale"])
async def test_a_layer_that_is_damaged_at_its_home_makes_the_load_none(pair, layer, what):
    """All layers may have landed by then: the load's end says no, the home drops the block, and the next get misses
    it and what is behind it."""
    a, b = pair.a, pair.b
    nbytes = b.geometry.pool_layer_bytes
    async with b.pool.layers(KEYS, LAYERED) as found:
        victim = a if "a" in found.pinned.sources else b
        lease = next(one for one in found.pinned._leases if one.home == victim.name)
        slot, number = lease.pinned.slots[-1], lease.positions[-1]
        at = slot * b.geometry.pool_bytes + layer * nbytes + (nbytes - 1 if what == "scale" else 7)
        victim.dram.memory[at] ^= 0x41
        assert not await found.read(lambda layer: None)
    async with asyncio.timeout(20):
        while await b.store.lookup(KEYS) != number:  # noqa: ASYNC110 - the home hears of it in its own time
            await asyncio.sleep(0.01)
    assert (await b.pool.get(KEYS, WHOLE)).blocks == number


@pytest.mark.parametrize("stop_at", [0, 2])
async def test_a_load_that_is_cancelled_halfway_writes_no_more_and_gives_its_room_back(pair, stop_at):
    b = pair.b

    async def load() -> None:
        async with b.pool.layers(KEYS, LAYERED) as found:
            await found.read(lambda layer: task.cancel() if layer == stop_at else None)

    task = asyncio.create_task(load())
    with pytest.raises(asyncio.CancelledError):
        await task
    before = b.kv[list(LAYERED)].clone()
    staging = b.pool._in
    assert len(staging._free) == staging.num_slots and not staging._waiters
    b.pool._codes_in.zero_()  # a task that still reads it would write zeros
    await asyncio.sleep(0.05)
    assert torch.equal(b.kv[list(LAYERED)].view(torch.int16), before.view(torch.int16))
    async with b.pool.layers(KEYS, LAYERED) as found:
        assert await found.read(lambda layer: None)


async def test_loads_at_once_have_their_turns_in_the_staging_area(pair):
    """Three loads and a get of whole blocks take more room than there is at once."""
    b = pair.b
    assert (await b.pool.get(KEYS, WHOLE)).blocks == COUNT
    whole = b.kv[list(WHOLE)].clone()
    targets = [range(first, first + 7) for first in (0, 24, 31)]

    async def load(blocks: range) -> None:
        async with b.pool.layers(KEYS[:7], blocks) as found:
            assert await found.read(lambda layer: None)
        assert torch.equal(b.kv[list(blocks)], whole[:7])

    got, *_ = await asyncio.gather(b.pool.get(KEYS, WHOLE), *(load(blocks) for blocks in targets))
    assert got.blocks == COUNT and torch.equal(b.kv[list(WHOLE)], whole)


@pytest.mark.parametrize("pair", [(("tcp",), "int8", 9)], indirect=True)
async def test_a_prefix_that_has_no_room_for_two_layers_comes_whole(pair):
    """24 layers of blocks do not fit into half of 9 blocks of 5 layers."""
    async with pair.b.pool.layers(KEYS, LAYERED) as found:
        assert found is None
    assert (await pair.b.pool.get(KEYS, LAYERED)).blocks == COUNT
    assert torch.equal(pair.b.kv[list(LAYERED)].isnan(), torch.zeros_like(pair.b.kv[list(LAYERED)], dtype=torch.bool))


async def test_an_engine_loads_encoded_blocks_by_layer(pair):
    assert isinstance(pair.b.pool, EncodedBlocks)
    assert layers_of(pair.b.pool) == pair.b.pool.layers
