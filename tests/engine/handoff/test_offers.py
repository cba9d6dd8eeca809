"""Blocks that are used in the engine's arena only, and a pool whose admission counts uses."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from cache.block import BlockGeometry, BlockKey
from cache.keys import root_key
from cache.pool.admission import SecondHit
from cache.pool.block_pool import BlockPool
from cache.results import GetResult
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.handoff.prefix_sources import PrefixSources, Prices, Source
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


class Far:
    """Blocks that came from another site."""

    def __init__(self, keys: Iterable[BlockKey]) -> None:
        self.keys = set(keys)

    def came(self, key: BlockKey) -> bool:
        return key in self.keys

    def computed(self, keys: Sequence[BlockKey]) -> None:
        self.keys.difference_update(keys)


async def test_a_block_of_another_site_is_not_offered_for_good(node):
    """It would stay in the pool without a time to live."""
    store, batcher, loader, publisher = node
    blocks, first = batcher.blocks, request("first")
    keys = first.block_keys(BLOCK)[:3]
    publisher.far = Far(keys[1:])
    first.block_ids, first.num_computed = batcher.pool.allocate(4), 3 * BLOCK
    blocks.name_full(first)
    blocks.release(first)
    for name in ("second", "third"):
        again = request(name)
        await loader.load(again)
        assert len(again.block_ids) == 3, "found in the arena"
        await until(lambda: not publisher.backlog)
        blocks.release(again)
    assert await store.exists_many(keys) == [True, False, False]

    computed = request("computed")
    await loader.load(computed)
    publisher.publish(blocks.named(computed, 0, 3))
    await until(lambda: not publisher.backlog)
    blocks.release(computed)
    again = request("again")
    await loader.load(again)
    await until(lambda: not publisher.backlog)
    blocks.release(again)
    assert await store.exists_many(keys) == [True] * 3, "computed here, it is a block of this site"


async def test_bytes_of_another_site_wait_in_no_queue_of_near_memory(node):
    _, _, loader, _ = node
    sources, coming = loader._sources, []

    async def get(keys, block_ids):
        coming.append(sources._coming)
        return GetResult(0, 0)

    for site in (None, "west"):
        asked = request(f"from {site}")
        keys = asked.block_keys(BLOCK)[:3]
        await loader._fetch(asked, Source("x", keys, 0.0, 1.0, SLOT, get, site))
    assert coming == [3 * SLOT, 0]
