"""The pooled store over real sockets and shared memory: one run of what test_store.py covers in depth."""

import random

import pytest

from cache.arena import Arena
from cache.share import Deadlines
from cache.ssd import SsdTier
from cache.store import Store
from cache.tiers import LocalStore
from net.channel import Channel
from net.memory import Region
from net.transfer import TransferEngine

SLOT = 368_640 // 2  # large enough for the paths that leave the event loop
ROOT = b"r" * 16
COUNT = 24
KEYS = [random.Random(i).randbytes(16) for i in range(COUNT)]
BLOCKS = [random.Random(1000 + i).randbytes(SLOT) for i in range(COUNT)]
OFFSETS = [(COUNT - 1 - i) * SLOT for i in range(COUNT)]


class Node:
    """One node: channel, transfer engine, share, and a region of its own."""

    def __init__(self, node_id: str, order: tuple[str, ...], members: list[str], directory) -> None:
        self.node_id = node_id
        self.channel = Channel(node_id, {"root": ROOT.hex()}, lambda hello: None)
        self.transfer = TransferEngine(self.channel, order)
        self.arena = Region.shared(f"{node_id}-dram", 6 * SLOT)
        ssd = SsdTier(directory / node_id, SLOT, 32 << 20, ROOT)
        self.local = LocalStore(Arena(self.arena, SLOT), ssd)
        self.kv = Region.shared("kv", COUNT * SLOT)
        self.store = Store(
            node_id, self.channel, self.transfer, self.local, lambda: members, block_bytes=SLOT, deadlines=Deadlines()
        )
        self.store.attach(self.kv)

    async def start(self, others):
        self.address = await self.channel.start("127.0.0.1", 0)
        for other in others:
            self.channel.introduce(other.node_id, other.address)
            other.channel.introduce(self.node_id, self.address)

    async def close(self):
        await self.channel.close()
        await self.store.close()
        self.local.check_integrity()
        self.arena.close()
        self.kv.close()


@pytest.fixture(params=[("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
async def nodes(request, tmp_path):
    members = ["a", "b", "c"]
    made = [Node(node_id, request.param, members, tmp_path) for node_id in members]
    for i, node in enumerate(made):
        await node.start(made[:i])
    yield made
    for node in made:
        await node.close()


async def test_blocks_travel_and_a_lost_node_is_a_miss(nodes, request):
    a, b, c = nodes
    for offset, block in zip(OFFSETS, BLOCKS, strict=True):
        a.kv.memory[offset : offset + SLOT] = block
    assert await a.store.put(KEYS, "kv", OFFSETS) == COUNT
    assert await b.store.put([], "kv", []) == 0
    assert await b.store.lookup(KEYS) == COUNT
    result = await b.store.get(KEYS, "kv", OFFSETS)
    assert result.blocks == COUNT
    for offset, block in zip(OFFSETS, BLOCKS, strict=True):
        assert b.kv.memory[offset : offset + SLOT] == block
    assert set(result.sources) == {"a", "b", "c"}
    assert result.transports == {
        "local": result.sources["b"],
        request.node.callspec.id: COUNT - result.sources["b"],
    }
    assert result.tiers.get("ssd", 0) > 0, "three arenas of six slots cannot hold all"
    await c.channel.close()
    left = await b.store.lookup(KEYS)
    assert left < COUNT
    assert (await b.store.get(KEYS, "kv", OFFSETS)).blocks == left
