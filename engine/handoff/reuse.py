"""Reuse of KV beyond this node's engine arena: loads prefixes from the pooled store and publishes new blocks to it.

Both directions hold their blocks with transfer references while bytes move, so neither an abort nor an eviction can
free a block during a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from cache.block import BlockGeometry, BlockKey
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.results import GetResult
from cache.store.calls import HOME_ERRORS
from cache.store.layered import PinnedBlocks
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.layered_load import LayeredLoad, LayerGate, hides
from engine.handoff.prefix_sources import POOL, PrefixSources, Source
from engine.observe.intervals import Intervals
from engine.pooled.pool_blocks import LayerRead, Layers, PoolBlocks
from engine.pooled.prefetch import Prefetch
from engine.step.request import Request
from engine.step.step import Named
from net.loop.tasks import awaited, keep
from net.metrics.events import Metrics

log = logging.getLogger("mooncake.engine")

PUBLISH_BATCH_BLOCKS = 32
SHARED_STEP_MAX_WAIT_S = 1.0  # beyond its own time, for a prefix, if other requests are in the step: its home hangs
MAX_PUBLISH_BACKLOG_BLOCKS = 4096  # held blocks cannot be evicted: beyond this, new blocks stay local


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How prefixes are loaded into the arena. `prefetch` says whether requests wait for their prefix. If they do, and
    `layers` reads the pool layer by layer, a request starts before its prefix has arrived and waits for each layer; if
    the node has other requests, it starts only when the step should not have to wait. `open_beyond` finds the room of a
    request whose KV exceeds the arena (engine/beyond/host.py)."""

    geometry: BlockGeometry
    prefetch: Prefetch
    layers: Layers | None = None
    open_beyond: Callable[[Request], Awaitable[None]] | None = None


class PrefixLoader:
    """Loads a request's prefix from the pool or another arena into the engine arena if that is faster than computing
    it."""

    def __init__(
        self,
        batcher: Batcher,
        options: LoadOptions,
        costs: StepCosts,
        metrics: Metrics,
        sources: PrefixSources,
        used: Callable[[Sequence[Named]], None] = lambda named: None,
    ) -> None:
        """used: called with the blocks that were found in the engine's own arena."""
        self._used = used
        self._layers = options.layers if options.prefetch.policy == "wait" else None
        self._prefetch = options.prefetch
        self._open_beyond = options.open_beyond
        self._batcher = batcher
        self._geometry = options.geometry
        self._costs = costs
        self._metrics = metrics
        self._sources = sources
        self._held: list[Sequence[int]] = []  # blocks that are being filled
        self._fresh: list[Sequence[int]] = []  # those of them that no request has taken over yet

    def held_blocks(self) -> Iterator[int]:
        """Ids of blocks being filled, one item per transfer reference."""
        return (block_id for blocks in self._held for block_id in blocks)

    def fresh_blocks(self) -> Iterator[int]:
        """Ids of blocks that no request has taken over yet, one item per request reference."""
        return (block_id for blocks in self._fresh for block_id in blocks)

    def _allocate(self, count: int) -> list[int]:
        """Take and hold blocks to fill. Raises OutOfBlocks."""
        blocks = self._batcher.pool.allocate(count)
        self._batcher.pool.hold(blocks)
        self._held.append(blocks)
        self._fresh.append(blocks)
        return blocks

    def _adopt(self, blocks: Sequence[int], count: int) -> None:
        """A request takes over the first `count` of `blocks` now; the others become free."""
        self._fresh = [one for one in self._fresh if one is not blocks]
        self._batcher.pool.release(blocks[count:])

    def _unhold(self, blocks: Sequence[int]) -> None:
        self._held = [one for one in self._held if one is not blocks]
        self._batcher.pool.unhold(blocks)

    async def load(self, request: Request) -> LayeredLoad | None:
        """Extend the request's prefix; the node computes the rest later. If a load is returned, it continues during the
        request's first step, which has to wait for each of its layers."""
        if request.finished:  # it was aborted before this task began
            return None
        if request.cold is not None:
            assert self._open_beyond is not None, "only such a node has such requests"
            await self._open_beyond(request)
            return None
        size = self._geometry.block_size
        local = self._batcher.blocks.adopt_prefix(request)
        if local:
            self._used(self._batcher.blocks.named(request, 0, local))
        if not request.fetches:
            return None
        keys = request.block_keys(size)[: (request.num_tokens - 1) // size]
        for source in await self._sources.of(keys, local, crosses=not request.site_bound):
            before = len(request.block_ids)
            if request.finished:
                break
            if self._layers is not None and source.name == POOL and request.part is None:
                load = await self._start(self._layers, request, source)
                if load is not None or request.finished or len(request.block_ids) > before:
                    return load
            await self._fetch(request, source)
            if len(request.block_ids) > before:
                break
        return None

    async def _start(self, layers: Layers, request: Request, source: Source) -> LayeredLoad | None:
        """Begin to read all blocks of `source` from the pool layer by layer; None if that is not possible."""
        pool, first, keys = self._batcher.pool, len(request.block_ids), source.keys
        if pool.num_free < len(keys):
            return None
        known = (first + len(keys)) * self._geometry.block_size
        step_s = self._costs.prefill.estimate(request.num_tokens - known, known)
        in_company = len(self._batcher.requests) > 1
        gate = LayerGate(SHARED_STEP_MAX_WAIT_S + step_s if in_company else None)
        blocks = self._allocate(len(keys))
        begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        joins = asyncio.Event()

        def landed(count: int, seconds: float) -> None:
            gate.landed(count - 1)
            if hides(count, self._geometry.num_layers, seconds, step_s):
                joins.set()

        def over(task: asyncio.Task[bool]) -> None:
            """Runs however the load ended, also if it was cancelled before its first line."""
            gate.open()
            joins.set()
            self._unhold(blocks)
            if not begun.done():
                begun.set_result(False)
                if not task.cancelled() and (error := task.exception()) is not None:
                    level = logging.INFO if isinstance(error, HOME_ERRORS) else logging.ERROR  # homes may be lost
                    log.log(level, "could not begin a layered load", exc_info=error)

        task = awaited(self._read_layers(layers(keys, blocks), request, source, landed, begun))
        task.add_done_callback(over)
        load = LayeredLoad(first, blocks, gate, task)
        started = False
        try:
            started = await begun
            if started and in_company:
                await joins.wait()
                started = not task.done() or await load.whole()
            started = started and not request.finished
        finally:
            if not started:
                task.cancel()
            self._adopt(blocks, len(blocks) if started else 0)
        if not started:
            return None
        if task.done() and in_company:
            self._batcher.blocks.adopt_loaded(request, blocks)
            return None
        self._batcher.blocks.adopt_arriving(request, blocks)
        return load

    async def _read_layers(
        self,
        arriving: AbstractAsyncContextManager[LayerRead | None],
        request: Request,
        source: Source,
        on_layer: Callable[[int, float], None],
        begun: asyncio.Future[bool],
    ) -> bool:
        """on_layer(number of layers that have landed, seconds since the read began); `begun` is set to whether all
        blocks are pinned, so that only a failure can prevent their arrival."""
        intervals, asked, nbytes = Intervals(), time.monotonic(), source.block_bytes * len(source.keys)
        layer_bytes, last, begin = nbytes // self._geometry.num_layers, asked, asked

        def landed(layer: int) -> None:
            nonlocal last
            now = time.monotonic()
            on_layer(layer + 1, now - begin)
            intervals.add(last, now, layer_bytes)
            last = now

        async with arriving as found:
            if not begun.done():
                begun.set_result(found is not None)
            if found is None:
                return False
            last = begin = time.monotonic()
            with self._sources.loading(nbytes) as before:
                whole = await found.read(landed)
                way_s = time.monotonic() - begin
        if whole:
            self._sources.observe(GetResult(len(source.keys), nbytes), before, way_s)
            self._account(request, source, found.pinned, asked, intervals)
        return whole

    def _account(
        self,
        request: Request,
        source: Source,
        pinned: PinnedBlocks,
        asked: float,
        intervals: Intervals,
    ) -> None:
        """asked: when the blocks were requested, monotonic seconds."""
        now, num_blocks = time.monotonic(), len(source.keys)
        seconds = now - asked
        nbytes = num_blocks * source.block_bytes
        self._metrics.count_prefix_load(pinned.tiers, 0)
        for transport, count in pinned.transports.items():
            self._metrics.count_transfer("read", transport, count, seconds)
        detail = {
            "blocks": num_blocks,
            "bytes": nbytes,
            "seconds": seconds,
            "estimated_s": source.load_s,
            "sources": pinned.sources,
            "tiers": pinned.tiers,
            "transports": dict(pinned.transports),
            "intervals": intervals.before(now),
        }
        request.journal.note(now, "prefix_fetched", detail)

    async def _fetch(self, request: Request, source: Source) -> None:
        pool, keys = self._batcher.pool, source.keys
        try:
            # These come first: without all of them, the rest is useless.
            others = self._batcher.blocks.others_to_load(request, len(keys))
            keys = [*(key for *_, key in others), *keys]
            if others and pool.num_free < len(keys):
                return
            blocks = self._allocate(min(len(keys), pool.num_free))
        except OutOfBlocks:
            return
        good = 0
        begin = time.monotonic()
        try:
            # Bytes of another site wait in the queue of its link, which is priced there, not in that of near memory.
            near_bytes = source.block_bytes * len(blocks) if source.site is None else 0
            with self._sources.loading(near_bytes) as before:
                result = await self._prefetch.fetch(source.get, keys[: len(blocks)], blocks)
            good = result.blocks if not others or result.blocks == len(keys) else 0
        finally:
            self._unhold(blocks)
            if request.finished:
                good = 0
            self._adopt(blocks, good)
        seconds = time.monotonic() - begin
        self._metrics.count_prefix_load(result.tiers, len(blocks) - good if source.name == POOL else 0)
        each = result.nbytes // max(1, result.blocks)
        for transport, count in result.transports.items():
            self._metrics.count_transfer("read", transport, count * each, seconds)
        if source.site is None:
            self._sources.observe(result, before, seconds)
        if good:
            placed = [(group, place, block) for (group, place, _), block in zip(others, blocks, strict=False)]
            first = len(request.block_ids)
            self._batcher.blocks.adopt_loaded(request, blocks[len(others) : good], placed)
            if source.arrived is not None:
                source.arrived(self._batcher.blocks.named(request, first, len(request.block_ids)))
            detail = {
                "blocks": good,
                "bytes": result.nbytes,
                "seconds": seconds,
                "estimated_s": source.load_s,
                "sources": result.sources,
                "tiers": result.tiers,
                "transports": {t: n * each for t, n in result.transports.items()},
            } | ({} if source.site is None else {"site": source.site})
            if result.saved_bytes:
                detail["saved_bytes"] = result.saved_bytes
            request.journal.note(time.monotonic(), "prefix_fetched", detail)


class Foreign(Protocol):
    """An engine.sites.far_prefixes.FarPrefixes."""

    def came(self, key: BlockKey) -> bool: ...

    def computed(self, keys: Sequence[BlockKey]) -> None: ...


class Publisher:
    """Writes newly full blocks to their homes in the pooled store in the background, oldest first, in batches."""

    far: Foreign | None = None
    """Knows the blocks that came from other sites, if any may come from there."""

    def __init__(
        self, pool: BlockPool, pool_blocks: PoolBlocks | None, metrics: Metrics, copy_ttl_s: float = 0.0
    ) -> None:
        """pool_blocks: the destination; None = publish nothing. copy_ttl_s: time to live of copies from other
        sites."""
        self._copy_ttl_s = copy_ttl_s
        self._metrics = metrics
        self._pool = pool
        self._pool_blocks = pool_blocks
        self._backlog: deque[Named] = deque()
        self._again: deque[Named] = deque()  # offered before; the pool may have refused them
        self._copies: deque[Named] = deque()  # of another site
        self._wake = asyncio.Event()
        self._in_flight: list[Named] = []
        self._idle = asyncio.Event()  # no batch is being written
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0

    def start(self) -> None:
        if self._pool_blocks is not None:
            self._task = keep(self._run, "publishing blocks")

    def publish(self, named: Sequence[Named]) -> None:
        """Queue full blocks that were computed at this site; they are held until written or given up."""
        if self.far is not None:
            self.far.computed([key for key, _, _ in named])
        self.num_dropped += self._take(self._backlog, named)

    def offer_again(self, named: Sequence[Named]) -> None:
        """Queue blocks that were used in the arena and offer those that the pool lacks once more, so that an admission
        policy that counts uses counts this one. Blocks of other sites are none of them: they enter the pool as copies,
        with a time to live, or not at all."""
        self._take(self._again, named if self.far is None else [row for row in named if not self.far.came(row[0])])

    def copy(self, named: Sequence[Named]) -> None:
        """Queue blocks of another site that become copies at this one (cache/sites/copies.py)."""
        self._take(self._copies, named)

    def _take(self, queue: deque[Named], named: Sequence[Named]) -> int:
        """Queue and hold blocks; returns the number of blocks that did not fit."""
        if self._task is None or not named:
            return 0
        taken = named[: max(0, MAX_PUBLISH_BACKLOG_BLOCKS - len(queue))]
        self._pool.hold([block_id for _, block_id, _ in taken])
        queue.extend(taken)
        self._wake.set()
        return len(named) - len(taken)

    @property
    def backlog(self) -> int:
        """Number of blocks not written yet."""
        return len(self._backlog) + len(self._again) + len(self._copies) + len(self._in_flight)

    def held_blocks(self) -> Iterator[int]:
        """Ids of queued blocks, one item per transfer reference."""
        parts = self._backlog, self._again, self._copies, self._in_flight
        return (block_id for part in parts for _, block_id, _ in part)

    async def give_up(self) -> None:
        """Drop all queued blocks, and wait for the end of the batch that is being written."""
        self._empty()
        await self._idle.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._empty()

    def _empty(self) -> None:
        for queue in (self._backlog, self._again, self._copies):
            self._pool.unhold([block_id for _, block_id, _ in queue])
            queue.clear()

    async def _run(self) -> None:
        assert self._pool_blocks is not None
        while True:
            queue = self._backlog or self._again or self._copies
            if not queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            count = min(PUBLISH_BATCH_BLOCKS, len(queue))
            batch = self._in_flight = [queue.popleft() for _ in range(count)]
            self._idle.clear()
            try:
                rows = batch if queue is self._backlog else await self._lacking(batch)
                if rows:
                    keys, blocks, facts = zip(*rows, strict=True)
                    ttl_s = self._copy_ttl_s if queue is self._copies else 0.0
                    stored = await self._pool_blocks.put(keys, blocks, facts, ttl_s)
                    self._metrics.count("mooncake:store_put_blocks", stored)
            except HOME_ERRORS as error:  # a lost home costs reuse, never correctness
                log.info("publishing %d blocks failed: %r", len(batch), error)
            finally:
                self._in_flight = []
                self._idle.set()
                self._pool.unhold([block_id for _, block_id, _ in batch])

    async def _lacking(self, batch: Sequence[Named]) -> list[Named]:
        assert self._pool_blocks is not None
        there = await self._pool_blocks.exists([key for key, _, _ in batch])
        return [row for row, here in zip(batch, there, strict=True) if not here]
