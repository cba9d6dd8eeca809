"""Blocks of the arena on their way to the pool and back, plain and encoded, and how long a request waits for them."""

import asyncio

import pytest
import torch

from cache.block import BlockGeometry
from cache.pool.policy import PLAIN
from cache.results import GetResult
from engine.node.engine import pool_blocks
from engine.pooled.prefetch import WINDOW_BLOCKS, Prefetch
from net.transfer.common.memory import Region

BLOCKS = 12


class DictStore:
    """The pool as a dictionary: what the store does with bytes, and nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.regions, self.values, self.facts = nbytes, {}, {}, {}

    def attach(self, region):
        self.regions[region.name] = region

    async def put_from(self, keys, region, offsets, facts=(), ttl_s=0.0):
        await asyncio.sleep(0)
        new = 0
        for i, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
            new += key not in self.values
            self.values[key] = bytes(self.regions[region].memory[offset : offset + self.nbytes])
            self.facts[key] = facts[i]
        return new

    async def get_into(self, keys, region, offsets, site=None):
        run = 0
        for key, offset in zip(keys, offsets, strict=True):
            if key not in self.values:
                break
            self.regions[region].memory[offset : offset + self.nbytes] = self.values[key]
            run += 1
        return GetResult(run, run * self.nbytes, {"home": run}, {"tcp": run}, {"dram": run})


def make(pool_dtype, staging_bytes=1 << 20):
    geometry = BlockGeometry(4, 2, 8, 4, "bfloat16", pool_dtype)
    arena = Region.shared("kv", BLOCKS * geometry.block_bytes)
    store = DictStore(geometry.pool_bytes)
    store.attach(arena)
    view = torch.frombuffer(arena.memory, dtype=torch.bfloat16).view(-1, *geometry.shape)
    return geometry, arena, store, view, pool_blocks(store, arena, geometry, staging_bytes)


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "fp8", "int8", "int4"])
async def test_blocks_come_back_as_they_went(pool_dtype):
    """More blocks than one staging area holds, to other places than they came from, and one that is missing."""
    geometry, arena, store, view, pool = make(pool_dtype, 2500)
    torch.manual_seed(1)
    view[:6] = torch.randn(6, *geometry.shape)
    keys = [bytes([i]) * 16 for i in range(6)]
    assert await pool.put(keys, range(6), [PLAIN] * 6) == 6
    assert {len(value) for value in store.values.values()} == {geometry.pool_bytes}
    assert set(store.facts.values()) == {PLAIN}
    del store.values[keys[5]]
    result = await pool.get(keys, range(6, 12))
    assert (result.blocks, result.nbytes, result.sources) == (5, 5 * geometry.pool_bytes, {"home": 5})
    error = (view[6:11].float() - view[:5].float()).abs().max()
    assert error == 0 if pool_dtype == "bfloat16" else 0 < error < 0.3
    pool.close()
    del view
    arena.close()


async def test_a_cancelled_put_leaves_the_staging_area_usable():
    _, arena, store, view, pool = make("int8")
    putting = asyncio.create_task(pool.put([bytes(16)] * BLOCKS, range(BLOCKS), [PLAIN] * BLOCKS))
    await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert store.values == {}
    assert await pool.put([bytes(16)], [0], [PLAIN]) == 1
    pool.close()
    del view
    arena.close()


class SlowPool:
    """Each window arrives when it is let go."""

    def __init__(self, windows: int) -> None:
        self.letting_go, self.asked, self.cancelled = asyncio.Semaphore(windows), 0, 0

    async def get(self, keys, block_ids):
        assert len(keys) == len(block_ids)
        self.asked += len(keys)
        try:
            await self.letting_go.acquire()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return GetResult(len(keys), len(keys), {"home": len(keys)}, {}, {"ssd": len(keys)})


LONG = [bytes(16)] * (3 * WINDOW_BLOCKS)


async def fetched(pool, policy, timeout_s=60.0, busy=lambda: True):
    return await Prefetch(policy, timeout_s, busy).fetch(pool.get, LONG, range(len(LONG)))


async def test_wait_asks_for_everything_at_once():
    assert (await fetched(SlowPool(1), "wait")).blocks == len(LONG)


async def test_timeout_uses_what_has_arrived():
    pool = SlowPool(1)
    result = await fetched(pool, "timeout", timeout_s=0.05)
    assert (result.blocks, result.tiers) == (WINDOW_BLOCKS, {"ssd": WINDOW_BLOCKS})
    assert (pool.asked, pool.cancelled) == (2 * WINDOW_BLOCKS, 1)


async def test_timeout_takes_all_when_there_is_time():
    assert (await fetched(SlowPool(3), "timeout")).blocks == len(LONG)


async def test_best_effort_ends_when_the_node_has_nothing_else_to_do():
    pool = SlowPool(3)
    assert (await fetched(pool, "best-effort", busy=lambda: pool.asked < 2 * WINDOW_BLOCKS)).blocks == 2 * WINDOW_BLOCKS


async def test_best_effort_takes_one_window_in_any_case():
    assert (await fetched(SlowPool(1), "best-effort", busy=lambda: False)).blocks == WINDOW_BLOCKS
