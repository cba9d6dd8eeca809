"""Blocks that are used in the engine's arena only, and a pool whose admission counts uses."""

from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.admission import SecondHit
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.handoff.prefix_sources import PrefixSources, Prices
from engine.handoff.reuse import LoadOptions, PrefixLoader, Publisher
from engine.pooled.pool_blocks import PlainBlocks
from engine.pooled.prefetch import Prefetch
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.metrics.events import Metrics
from tests.cache.pooled import SLOT, cluster_of, put, until

BLOCK = 4
GEOMETRY = BlockGeometry(1, 1, 1, BLOCK, "float32")
ROOT = root_key("toy", GEOMETRY)
PROMPT = list(range(3 * BLOCK + 1))


class OfSlots(PlainBlocks):
    """Blocks of the pooled store's tests are larger than those of this geometry."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "kv", GEOMETRY)
        self._block_bytes = SLOT


def request(name: str) -> Request:
    return Request(name, PROMPT, len(PROMPT), SamplingParams(temperature=0, max_tokens=4), 0.0, ROOT)


@pytest.fixture
async def node():
    """(store with a full share that admits second hits, batcher, loader, publisher)"""
    async with cluster_of("a", slots=8, admission=SecondHit()) as cluster:
        store = cluster.stores["a"]
        await put(store, range(8))
        pool, metrics = BlockPool(16), Metrics("m", "n")
        batcher = Batcher(pool, BLOCK, 4, 64, 1000, {0})
        publisher = Publisher(pool, OfSlots(store), metrics)
        prefetch, costs = Prefetch("wait", 0.0, lambda: False), StepCosts()
        sources = PrefixSources(store, OfSlots(store), None, GEOMETRY, Prices(costs), "auto")
        loader = PrefixLoader(
            batcher, LoadOptions(GEOMETRY, prefetch), costs, metrics, sources,
            used=publisher.offer_again,
        )  # fmt: skip
        publisher.start()
        yield store, batcher, loader, publisher
        await publisher.close()
        assert pool.references() == {"request": 0, "transfer": 0}
        pool.check_integrity()


async def test_a_block_that_is_used_in_the_arena_alone_is_admitted_to_the_pool(node):
    store, batcher, loader, publisher = node
    blocks, first = batcher.blocks, request("first")
    keys = first.block_keys(BLOCK)[:3]
    first.block_ids, first.num_computed = batcher.pool.allocate(4), 3 * BLOCK
    publisher.publish(blocks.name_full(first))
    await until(lambda: not publisher.backlog)
    assert await store.exists_many(keys) == [False] * 3, "they were refused: nobody had used them twice"
    blocks.release(first)

    second = request("second")
    await loader.load(second)
    assert len(second.block_ids) == 3, "found in the arena"
    await until(lambda: not publisher.backlog)
    assert await store.exists_many(keys) == [True] * 3
    assert store.local.stats()["dram"]["refused"] == 3
    blocks.release(second)

    puts = store.stats()["put_blocks"]
    third = request("third")
    await loader.load(third)
    await until(lambda: not publisher.backlog)
    assert store.stats()["put_blocks"] == puts, "what the pool has is not offered again"
    blocks.release(third)
