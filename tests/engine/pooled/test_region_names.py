"""Everything that a node whose arena is on a GPU registers for transfers, in one engine: no name is taken twice."""

from __future__ import annotations

from contextlib import AsyncExitStack

from cache.arena import Arena
from cache.block import BlockGeometry
from cache.homes.rendezvous import equal_members
from cache.pool.policy import PLAIN
from cache.store.options import StoreOptions
from cache.store.store import Store
from cache.tiers.local_store import LocalStore
from engine.core.kv_ready import KV_REGION
from engine.pooled.device_blocks import DeviceBlocks
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from net.transfer.device.staging import DeviceRegion, DeviceTransferEngine
from tests.net.fake_device import FakeDevice

GEOMETRY = BlockGeometry(2, 1, 16, 4, "bfloat16")


async def test_a_node_with_its_arena_on_a_device_reads_values_and_blocks_of_the_pool() -> None:
    """A weight of the pool is read through staging memory of the store, in addition to that of transfers."""
    async with AsyncExitStack() as stack:
        channel = Channel("gpu", {})
        transfer = DeviceTransferEngine(channel, buffer_bytes=4096)
        await channel.start("127.0.0.1")
        stack.push_async_callback(channel.close)
        stack.push_async_callback(transfer.close)
        share = stack.enter_context(Region.shared("arena", 64 * GEOMETRY.block_bytes))
        local = LocalStore(Arena(share, GEOMETRY.block_bytes), None)
        store = Store(
            "gpu",
            channel,
            transfer,
            local,
            lambda: equal_members(["gpu"]),
            StoreOptions(block_bytes=GEOMETRY.block_bytes),
        )
        device = FakeDevice(4 * GEOMETRY.block_bytes)
        stack.callback(device.close)
        transfer.register(DeviceRegion(KV_REGION, device))
        blocks = DeviceBlocks(store, DeviceRegion(KV_REGION, device), GEOMETRY)
        device.memory[:] = bytes(range(256)) * (len(device.memory) // 256)
        await store.put(b"w" * 16, b"a weight")
        assert await store.get(b"w" * 16) == b"a weight"
        keys = [bytes([i]) * 16 for i in range(2)]
        assert await blocks.put(keys, [0, 1], [PLAIN] * 2) == 2
        assert (await blocks.get(keys, [2, 3])).blocks == 2
        half = len(device.memory) // 2
        assert device.memory[half:] == device.memory[:half]
        blocks.close()
        await store.close()
