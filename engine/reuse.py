"""Reuse of KV beyond this node's engine arena: prefixes are loaded from the pooled store, new blocks published to it.

Both directions hold their blocks with transfer references while bytes move, so neither an abort nor an eviction can
give a block away under a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from cache.block import BlockGeometry, BlockKey
from cache.pool import BlockPool, OutOfBlocks
from cache.store import Store
from engine.batcher import Batcher
from engine.costs import StepCosts
from engine.request import Request
from net.metrics import Metrics
from sched.cost import TransferModel

log = logging.getLogger("mooncake.engine")

PUBLISH_BATCH_BLOCKS = 32
MAX_PUBLISH_BACKLOG_BLOCKS = 4096  # held blocks cannot be evicted: beyond this, new blocks stay local


class PrefixLoader:
    """Fetches what the store has of a request's prefix into the engine arena, when that beats computing it."""

    def __init__(
        self,
        batcher: Batcher,
        store: Store | None,
        region: str,
        geometry: BlockGeometry,
        costs: StepCosts,
        network: TransferModel,
        policy: str,
        metrics: Metrics,
    ) -> None:
        self._batcher = batcher
        self._store = store
        self._region = region
        self._geometry = geometry
        self._costs = costs
        self._network = network
        self._policy = policy  # auto | always | never
        self._metrics = metrics

    async def load(self, request: Request) -> None:
        """Extend the request's prefix. Whatever cannot be had is simply computed later."""
        size = self._geometry.block_size
        local = self._batcher.blocks.adopt_prefix(request)
        keys = request.block_keys(size)[local : (request.num_tokens - 1) // size]
        if self._store is None or not keys or self._policy == "never":
            return
        found = await self._store.lookup(keys)
        if not found or request.finished or not self._pays(local * size, found * size):
            return
        await self._fetch(request, keys[:found])

    def _pays(self, context: int, num_tokens: int) -> bool:
        """Algorithm 1's comparison for one node: move the blocks or compute them."""
        if self._policy == "always":
            return True
        fetch = self._network.estimate(num_tokens * self._geometry.token_bytes)
        return fetch < self._costs.prefill.estimate(num_tokens, context)

    async def _fetch(self, request: Request, keys: Sequence[BlockKey]) -> None:
        assert self._store is not None
        pool = self._batcher.pool
        try:
            blocks = pool.allocate(min(len(keys), pool.num_free))
        except OutOfBlocks:
            return
        pool.hold(blocks)
        good = 0
        begin = time.monotonic()
        try:
            offsets = [block * self._geometry.block_bytes for block in blocks]
            result = await self._store.get(keys[: len(blocks)], self._region, offsets)
            good = result.blocks
        finally:
            pool.unhold(blocks)
            if request.finished:
                good = 0
            pool.release(blocks[good:])
        seconds = time.monotonic() - begin
        self._metrics.count_store_get(result.tiers, len(blocks) - good)
        for transport, count in result.transports.items():
            self._metrics.count_transfer("read", transport, count * self._geometry.block_bytes, seconds)
        if result.nbytes:
            self._network.observe(result.nbytes, seconds)
        if good:
            self._batcher.blocks.adopt_loaded(request, blocks[:good])
            detail = {
                "blocks": good,
                "bytes": result.nbytes,
                "seconds": seconds,
                "sources": result.sources,
                "tiers": result.tiers,
                "transports": {t: n * self._geometry.block_bytes for t, n in result.transports.items()},
            }
            request.log.append((time.monotonic(), "prefix_fetched", detail))


class Publisher:
    """Writes newly full blocks behind to their homes in the pooled store, oldest first, in batches."""

    def __init__(
        self, store: Store | None, pool: BlockPool, region: str, geometry: BlockGeometry, metrics: Metrics
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._pool = pool
        self._region = region
        self._geometry = geometry
        self._backlog: deque[tuple[BlockKey, int]] = deque()
        self._wake = asyncio.Event()
        self._in_flight = 0
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.create_task(self._run())

    def publish(self, named: Sequence[tuple[BlockKey, int]]) -> None:
        """Queue full blocks (key, block id); they are held until written or given up."""
        if self._task is None or not named:
            return
        room = MAX_PUBLISH_BACKLOG_BLOCKS - len(self._backlog)
        self.num_dropped += max(0, len(named) - room)
        taken = named[: max(0, room)]
        self._pool.hold([block_id for _, block_id in taken])
        self._backlog.extend(taken)
        self._wake.set()

    @property
    def backlog(self) -> int:
        """Blocks that are not written yet."""
        return len(self._backlog) + self._in_flight

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._pool.unhold([block_id for _, block_id in self._backlog])
        self._backlog.clear()

    async def _run(self) -> None:
        assert self._store is not None
        while True:
            if not self._backlog:
                self._wake.clear()
                await self._wake.wait()
                continue
            count = min(PUBLISH_BATCH_BLOCKS, len(self._backlog))
            batch = [self._backlog.popleft() for _ in range(count)]
            self._in_flight = count
            try:
                offsets = [block_id * self._geometry.block_bytes for _, block_id in batch]
                stored = await self._store.put([key for key, _ in batch], self._region, offsets)
                self._metrics.count_store_put(stored)
            except Exception:  # a lost home costs reuse, never correctness
                log.warning("publishing %d blocks failed", len(batch), exc_info=True)
            finally:
                self._in_flight = 0
                self._pool.unhold([block_id for _, block_id in batch])
