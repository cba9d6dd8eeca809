"""The pooled store over real sockets and shared memory: one run of what test_store.py covers in depth."""

import asyncio
import random
import sys
from pathlib import Path

import pytest

from cache.arena import Arena
from cache.homes.rendezvous import equal_members
from cache.protocol import Deadlines
from cache.ssd import SsdTier
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine

PROJECT = Path(__file__).parents[3]

SLOT = 368_640 // 2  # large enough for the paths that leave the event loop
ROOT = b"r" * 16
COUNT = 24
KEYS = [random.Random(i).randbytes(16) for i in range(COUNT)]
BLOCKS = [random.Random(1000 + i).randbytes(SLOT) for i in range(COUNT)]
OFFSETS = [(COUNT - 1 - i) * SLOT for i in range(COUNT)]


class Node:
    """One node: channel, transfer engine, a share if it has a directory, and a region of its own."""

    def __init__(self, node_id: str, order: tuple[str, ...], members: list[str], directory) -> None:
        self.node_id = node_id
        self.channel = Channel(node_id, {"root": ROOT.hex()}, lambda hello: None)
        self.transfer = TransferEngine(self.channel, order)
        self.arena = Region.shared(f"{node_id}-dram", 6 * SLOT)
        self.local = None
        if directory is not None:
            self.local = LocalStore(Arena(self.arena, SLOT), SsdTier(directory, SLOT, 32 << 20, ROOT))
        self.kv = Region.shared("kv", COUNT * SLOT)
        self.store = Store(
            node_id,
            self.channel,
            self.transfer,
            self.local,
            lambda: equal_members(members),
            StoreOptions(block_bytes=SLOT, deadlines=Deadlines()),
        )
        self.store.attach(self.kv)

    async def start(self, others):
        self.address = await self.channel.start("127.0.0.1", 0)
        for other in others:
            self.channel.introduce(other.node_id, other.address)
            other.channel.introduce(self.node_id, self.address)

    async def close(self):
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        if self.local is not None:
            self.local.check_integrity()
            assert self.local.stats()["dram"]["held"] == 0
        self.arena.close()
        self.kv.close()


@pytest.fixture(params=[("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
async def nodes(request, tmp_path):
    members = ["a", "b", "c"]
    made = [Node(node_id, request.param, members, tmp_path / node_id) for node_id in members]
    for i, node in enumerate(made):
        await node.start(made[:i])
    yield made
    for node in made:
        await node.close()


def fill(node):
    for offset, block in zip(OFFSETS, BLOCKS, strict=True):
        node.kv.memory[offset : offset + SLOT] = block


def assert_filled(node):
    for offset, block in zip(OFFSETS, BLOCKS, strict=True):
        assert node.kv.memory[offset : offset + SLOT] == block


async def test_blocks_travel_and_a_lost_node_is_a_miss(nodes, request):
    a, b, c = nodes
    fill(a)
    assert await a.store.put_from(KEYS, "kv", OFFSETS) == COUNT
    assert await b.store.put_from([], "kv", []) == 0
    assert await b.store.lookup(KEYS) == COUNT
    result = await b.store.get_into(KEYS, "kv", OFFSETS)
    assert result.blocks == COUNT
    assert_filled(b)
    assert set(result.sources) == {"a", "b", "c"}
    assert result.transports == {
        "local": result.sources["b"],
        request.node.callspec.id: COUNT - result.sources["b"],
    }
    assert result.tiers.get("ssd", 0) > 0, "three arenas of six slots cannot hold all"
    await c.channel.close()
    left = await b.store.lookup(KEYS)
    assert left < COUNT
    assert (await b.store.get_into(KEYS, "kv", OFFSETS)).blocks == left


async def serve(directory):
    """The child process: a home that says where it is, and when all it has is on SSD."""
    home = Node("home", ("shm", "tcp"), ["home"], directory)
    await home.start([])
    print(home.address[1], flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        await home.local.drain()
        print("drained", flush=True)
    await home.close()


class Home:
    """That process, seen from outside."""

    async def start(self, directory, client):
        code = (
            "import asyncio, sys; from tests.cache.store.test_store_net import serve; asyncio.run(serve(sys.argv[1]))"
        )
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(directory), stdin=pipe, stdout=pipe, cwd=PROJECT
        )
        port = int(await self.process.stdout.readline())
        client.channel.introduce("home", ("127.0.0.1", port))
        return self

    async def drain(self):
        self.process.stdin.write(b"drain\n")
        assert await self.process.stdout.readline() == b"drained\n"

    async def kill(self):
        self.process.kill()
        await self.process.wait()

    async def stop(self):
        self.process.stdin.close()
        assert await self.process.wait() == 0


@pytest.mark.parametrize("order", [("shm", "tcp"), ("tcp",)], ids=["shm", "tcp"])
async def test_a_home_killed_with_9_is_a_miss_and_comes_back_with_its_ssd(tmp_path, order):
    client = Node("client", order, ["home"], None)
    home = await Home().start(tmp_path, client)
    try:
        fill(client)
        assert await client.store.put_from(KEYS, "kv", OFFSETS) == COUNT
        await home.drain()
        await home.kill()
        assert await client.store.lookup(KEYS) == 0
        assert (await client.store.get_into(KEYS, "kv", OFFSETS)).blocks == 0
        assert await client.store.put_from(KEYS, "kv", OFFSETS) == 0
        await home.start(tmp_path, client)
        client.kv.memory[:] = bytes(COUNT * SLOT)
        result = await client.store.get_into(KEYS, "kv", OFFSETS)
        assert (result.blocks, result.tiers, result.transports) == (COUNT, {"ssd": COUNT}, {order[0]: COUNT})
        assert_filled(client)
        await home.stop()
    finally:
        if home.process.returncode is None:
            await home.kill()
        await client.close()


async def test_pinned_blocks_are_read_part_by_part(nodes):
    a, b, _ = nodes
    fill(a)
    assert await a.store.put_from(KEYS[:6], "kv", OFFSETS[:6]) == 6
    parts = [(0, 4096), (4096, SLOT - 4096)]
    first, seen = OFFSETS[2], []

    def landed(part):
        start, length = parts[part]
        at = first + start
        seen.append(b.kv.memory[at : at + length] == BLOCKS[2][start : start + length])

    async with b.store.pinned(KEYS[:6]) as pinned:
        assert await pinned.read(b.kv, OFFSETS[:6], parts, landed)
        assert sum(pinned.sources.values()) == 6
        assert sum(pinned.transports.values()) == 6 * SLOT
    assert seen == [True, True]
    assert all(b.kv.memory[o : o + SLOT] == block for o, block in zip(OFFSETS[:6], BLOCKS[:6], strict=True))
    async with b.store.pinned(KEYS[:8]) as pinned:
        assert pinned is None  # two of them are nowhere


@pytest.mark.parametrize("harm", ["damaged", "lost"])
async def test_a_damaged_block_or_a_lost_home_is_no_read(nodes, harm):
    a, b, c = nodes
    fill(a)
    assert await a.store.put_from(KEYS[:6], "kv", OFFSETS[:6]) == 6
    async with b.store.pinned(KEYS[:6]) as pinned:
        victim = next(node for node in (a, c) if node.node_id in pinned.sources)
        if harm == "lost":
            await victim.channel.close()
        else:
            victim.arena.memory[:] = bytes(len(victim.arena.memory))
        assert not await pinned.read(b.kv, OFFSETS[:6], [(0, SLOT)], lambda part: None)
