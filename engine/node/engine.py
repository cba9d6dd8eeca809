"""The engine of a prefill, decode or mixed node: KV arena, batcher, model loop, and its service for other nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.store.store import Store
from engine.beyond.elsewhere import Elsewhere
from engine.beyond.held import Heads
from engine.beyond.host import Host
from engine.calibration.calibration import SHAPES, Room
from engine.calibration.earlier import earlier_of, measured
from engine.calibration.recalibration import Recalibration
from engine.config.beyond import beyond_room, lends
from engine.config.cache_policies import eviction
from engine.config.config import Config
from engine.config.forms import differs, feeds_pool
from engine.config.resolve import context_tokens
from engine.config.step_policies import batching_policy, queue_order, refusals
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.core.engine_load import Complete, EngineLoad
from engine.core.kv_ready import KV_REGION
from engine.core.step_recorder import step_recorder
from engine.core.worker import Drafts, Reuse, StepThread, Worker
from engine.experts.processes import ExpertProcesses
from engine.front.cluster import Cluster
from engine.handoff.arenas import Arenas
from engine.handoff.borrowing import Borrowing
from engine.handoff.converting import UNLIKE_REGION, Converter
from engine.handoff.outgoing import KvMoves
from engine.handoff.own_load import OwnLoad
from engine.handoff.prefix_sources import OthersArenas, PrefixSources, Prices
from engine.handoff.rail_news import RailNews
from engine.handoff.reuse import LoadOptions, PrefixLoader, Publisher
from engine.handoff.service import EngineService
from engine.handoff.wire import WireCodec
from engine.loading.load_model import LoadedModel
from engine.migration.migrator import Migrator
from engine.pooled.chosen_blocks import ChosenBlocks, decode_rate
from engine.pooled.device_blocks import DeviceBlocks
from engine.pooled.encoded_blocks import EncodedBlocks
from engine.pooled.pool_blocks import Layers, PlainBlocks, PoolBlocks
from engine.pooled.prefetch import Prefetch
from engine.pooled.rounding import Rounding
from engine.pooled.unlike_blocks import UnlikeBlocks
from engine.sites.far_prefixes import FarPrefixes, LinkRules
from engine.sites.members import mates, readers, reads_sites
from engine.speculation.ngram import NgramLookups
from engine.speculation.speculative import Lookups, Speculator
from engine.speculation.suffix import SuffixLookups, SuffixRules
from net.errors import RemoteError
from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from net.transfer.device.staging import DeviceRegion
from sched.batching import BatchingPolicy, BoundedSteps, Tuning
from sched.gossip.load_word import lack_bits
from sched.gossip.record import NodeRecord
from sched.offload import FilledSteps

log = logging.getLogger("mooncake.engine")

FORGET_BATCH = 512
"""Keys forgotten in one turn of the event loop."""


class Engine:
    """Owns the KV arena and everything that works on it."""

    def __init__(
        self,
        config: Config,
        shapes: tuple[BlockGeometry, BlockGeometry],
        loaded: LoadedModel,
        cluster: Cluster,
        metrics: Metrics,
        arenas: Arenas,
        complete: Complete,
    ) -> None:
        """shapes: of blocks of this arena, and of the pool; arenas: the known contents of other nodes' arenas;
        complete: see EngineLoad."""
        geometry, pooled = shapes
        unlike, each = differs(config), config.pooled_per_block
        store, transfer = cluster.store, cluster.transfer
        self._config = config
        self._transfer = transfer
        self.region = loaded.region
        self._processes = loaded.processes
        self._forgotten: Callable[[], None] | None = None
        if isinstance(self.region, Region):
            store.attach(self.region)
        else:
            transfer.register(self.region)
        self.pool = BlockPool(self.region.nbytes // geometry.block_bytes, eviction(config))
        self._calibrated: list[int] = []  # blocks that the calibration writes to
        self.costs = StepCosts()
        tuning = Tuning(config.prefill_chunk_tokens, config.tbt_budget_ms / 1000, self.costs.mixed, config.classes)
        policy = batching_policy(config, tuning)
        steps: BatchingPolicy = BoundedSteps(policy, config.max_step_ms / 1000, self.costs.mixed)
        self.offload = loaded.runner.model.offload
        if self.offload is not None:
            self.costs.take_least(self.offload.least_s)
            steps = FilledSteps(steps, self.offload.plan.fill_rows)
        self.draft = loaded.draft
        self.speculator = self._speculator()
        self.batcher = Batcher(
            self.pool,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            context_tokens(config, geometry),
            loaded.eos_token_ids,
            BatchRules(
                config.enable_prefix_caching,
                steps,
                queue_order(config),
                self.speculator,
                self.costs.prefill.estimate,
                geometry.groups,
                config.state_interval,
                config.max_model_len,
            ),
        )
        self.beyond = self._beyond(geometry, cluster, self._elsewhere(geometry, loaded, cluster, metrics))
        self.load = EngineLoad(config, self.batcher, self.costs, lambda record: complete(self._with_lack(record)))
        loaded.runner.unlike = unlike
        self.load.stages = (why_whole := loaded.runner.why_whole) is None
        if why_whole is not None and config.prefill_parallel != "none" and "prefill" in config.roles:
            log.info("--prefill-parallel %s: no part of a prompt here: %s", config.prefill_parallel, why_whole)
        reused = store if config.enable_prefix_caching else None
        rounding = None
        if geometry.rounded_when_it_pays:
            ratio = geometry.int4_bytes / geometry.block_bytes
            rounding = Rounding(transfer, store.router.homes, ratio, decode_rate(geometry))
        self._pool_blocks = pool_blocks(
            store, self.region, geometry, config.kv_staging_bytes, pooled if unlike else None, rounding
        )
        published = self._pool_blocks if reused and feeds_pool(config) else None
        self.publisher = Publisher(self.pool, published, metrics, config.site_copy_ttl_ms / 1000)
        self._converter = self._make_converter(geometry)
        rails = RailNews(transfer, store.router.homes, self._converter, rounding)
        borrowing = Borrowing(cluster.channel, transfer, KV_REGION, geometry, each)
        prices = Prices(self.costs, rails.fetch_s, rails.from_node_s)
        others = None if arenas is None else OthersArenas(arenas, borrowing)
        sources = PrefixSources(reused, self._pool_blocks, others, geometry, prices, config.prefix_fetch, pooled)
        if reused and config.site_link_limit_bytes and reads_sites(config.roles):
            rules = LinkRules(
                cluster.gossip.me.site,
                config.site_link_limit_bytes,
                lambda: readers(cluster.gossip),
                config.site_copy_ttl_ms / 1000,
            )
            sources.far = FarPrefixes(store, self._pool_blocks, rules, each, self.publisher.copy, metrics)
            self.publisher.far = sources.far
        prefetch = Prefetch(config.prefetch, config.prefetch_timeout_ms / 1000, self.is_busy)
        one_group = geometry.groups is None  # the layers of a prefix arrive group by group, not in the model's order
        by_layer = config.kv_overlap == "layer" and config.tensor_parallel_size == 1 and one_group  # ranks do not wait
        loader = PrefixLoader(
            self.batcher,
            LoadOptions(
                geometry,
                prefetch,
                layers_of(self._pool_blocks) if by_layer else None,
                None if self.beyond is None else self.beyond.open,
            ),
            self.costs,
            metrics,
            sources,
            used=self.publisher.offer_again if config.cache_admission != "always" else lambda named: None,
        )
        self._wire = self._wire_codec(geometry)
        self.worker = Worker(
            self.batcher,
            loaded.runner,
            Reuse(loader, self.publisher),
            self.costs,
            metrics,
            Drafts(self.speculator, self.draft),
            StepThread(config.engine_nice, step_recorder(config)),
        )
        rejection = refusals(config)
        moves = KvMoves(
            geometry,
            rails,
            config.kv_transfer,
            config.kv_overlap,
            arenas,
            self._wire,
            self._converter,
            pooled.block_size if each > 1 else 0,
            "prefill" in config.roles,
        )
        self.service = EngineService(
            cluster.channel,
            transfer,
            self.worker,
            moves,
            config.max_waiting_requests,
            OwnLoad(config.node_id, self.load, cluster.words, rejection),
            metrics,
        )
        if self.beyond is not None:
            self.service.take_beyond(self.beyond.welcome)
            self.beyond.answer(cluster.channel, self._check_new)
        room = Room((), config.block_size, config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        self._checks = Recalibration(self.worker, room, config.calibration_ms / 1000, self.service.blocks_freed)
        self.migrator = Migrator(config, cluster, self.worker, self.service, moves, self.load, metrics)
        metrics.set_cache_config(
            {"block_size": config.block_size, "num_gpu_blocks": self.pool.num_blocks, "cache_dtype": geometry.dtype}
        )

    def is_busy(self) -> bool:
        """Whether requests are running."""
        return bool(self.batcher.running)

    def _wire_codec(self, geometry: BlockGeometry) -> WireCodec | None:
        """The registered codec for KV sent to decode nodes; None: KV is sent as it is."""
        if not geometry.wire_encoded or not isinstance(self.region, Region):
            return None
        codec = WireCodec(self.region, geometry, self._config.kv_staging_bytes)
        self._transfer.register(codec.region)
        return codec

    def _elsewhere(
        self, geometry: BlockGeometry, loaded: LoadedModel, cluster: Cluster, metrics: Metrics
    ) -> Elsewhere | None:
        """None if requests of this node keep their blocks on it."""
        if not lends(self._config, geometry):
            return None
        model, always = loaded.runner.model, self._config.attention_elsewhere == "always"
        heads = Heads(model.config.num_heads, model.config.head_size, model.dtype.itemsize)
        return Elsewhere(geometry, heads, cluster.channel, lambda: mates(cluster.gossip), metrics, always=always)

    def _make_converter(self, geometry: BlockGeometry) -> Converter | None:
        """For KV sent to nodes whose blocks differ; None: nodes with such blocks do not connect to this one."""
        if not isinstance(self.region, Region) or geometry.groups is not None:
            return None
        return Converter(self.region, geometry, self._config.kv_staging_bytes, self._transfer.register)

    def _beyond(self, geometry: BlockGeometry, cluster: Cluster, elsewhere: Elsewhere | None) -> Host | None:
        """None if this node takes no request whose KV exceeds its arena."""
        share, config = cluster.store.local, self._config
        if beyond_room(config, geometry) is None or share is None or not isinstance(self.region, Region):
            return None
        return Host(config, geometry, self.region, cluster.store, self.batcher, self.costs, elsewhere)

    def _check_new(self) -> None:
        """Raises RemoteError if this node takes no new request."""
        self.worker.check()
        if self.load.draining:
            raise RemoteError(f"{self._config.node_id} leaves the cluster", "draining")

    def _speculator(self) -> Speculator | None:
        config, draft = self._config, self.draft
        if config.speculative_method == "none" or "decode" not in config.roles:
            return None
        limit = config.max_model_len if draft is None else min(config.max_model_len, draft.max_tokens)
        return Speculator(
            config.speculative_method,
            config.num_speculative_tokens,
            self._lookups(),
            config.speculative_length,
            limit,
            self.costs.verify_cost,
            draft,
        )

    def _lookups(self) -> Lookups | None:
        config = self._config
        if config.speculative_method == "ngram":
            return NgramLookups(config.prompt_lookup_min, config.prompt_lookup_max)
        if config.speculative_method == "suffix":
            factor, least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
            return SuffixLookups(SuffixRules(factor, least, config.suffix_decoding_cached_tokens))
        return None

    async def calibrate(self, fingerprint: str) -> int:
        """Measure steps before `start`, for at most --calibration-ms; returns their number. `fingerprint`: of the
        weights, by which it finds the measurements of an earlier start. The steps write to blocks that other nodes may
        already reserve, so this holds all blocks until it ends, and arriving requests wait."""
        config, size = self._config, self._config.block_size
        lent = self._calibrated = self.pool.allocate(self.pool.num_blocks)
        room = Room(lent, size, config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        seconds = config.calibration_ms / 1000
        try:
            runner = self.worker.runner
            shapes = room.fitting(SHAPES)
            earlier = earlier_of(config, fingerprint, runner.model.backend.name, shapes) if seconds else None
            steps = await self.worker.in_thread(partial(measured, runner, self.costs, room, seconds, earlier))
            if earlier is not None:
                self._checks.on_corrected(earlier.write)
            if self.beyond is not None and seconds:
                steps += await self.beyond.calibrate(self.worker.in_thread, self.worker.runner, lent)
            return steps
        finally:
            self._calibrated = []
            self.pool.release(lent)
            self.service.blocks_freed()

    def start(self) -> None:
        self.publisher.start()
        self.worker.start(self.service.on_emissions)
        self.migrator.start()
        if self._config.calibration_ms:
            self._checks.start()

    async def forget_prefixes(self) -> int:
        """Forget the keys of all blocks of the arena, and publish none of those that wait for it. Blocks of requests
        stay with them. Returns the number of keys."""
        await self.publisher.give_up()
        keys = self.pool.keys()
        for count, key in enumerate(keys, start=1):
            self.pool.forget(key)
            if count % FORGET_BATCH == 0:
                await asyncio.sleep(0)
        if self._forgotten is not None and not self.pool.usage()["named"]:
            self._forgotten()
        return len(keys)

    def on_forgotten(self, told: Callable[[], None]) -> None:
        """Call `told()` when `forget_prefixes` has left no name."""
        self._forgotten = told

    async def close(self) -> None:
        await self._checks.close()
        await self.migrator.close()
        await self.service.close()
        await self.worker.close()
        await self.publisher.close()
        if self.beyond is not None:
            self.beyond.close()
        if self.offload is not None:
            await asyncio.to_thread(self.offload.close)
        self._pool_blocks.close()
        self._transfer.unregister(self.region.name)
        if self._wire is not None:
            self._transfer.unregister(self._wire.region.name)
            self._wire.close()
        if self._converter is not None:
            if self._converter.used:
                self._transfer.unregister(UNLIKE_REGION)
            self._converter.close()
        if self._processes is not None:
            await asyncio.to_thread(self._processes.close)  # on GPUs, this also frees their parts of the region

    @property
    def lost(self) -> str | None:
        """Why this engine can no longer compute; None while it can."""
        return self.worker.lost or (None if self._processes is None else self._processes.lost)

    @property
    def ranks(self) -> ExpertProcesses | None:
        """The processes that share the experts; None without --expert-parallel-size."""
        return self._processes if isinstance(self._processes, ExpertProcesses) else None

    @property
    def experts(self) -> dict[str, Any] | None:
        """The ranks that share the experts (engine/experts/group.py); None without --expert-parallel-size."""
        return None if self.ranks is None else self.ranks.state()

    @property
    def awaited_ranks(self) -> str | None:
        """The ranks of other hosts that have not joined since the start, and where they join; None without."""
        return None if self.ranks is None else self.ranks.awaited()

    def _with_lack(self, record: NodeRecord) -> NodeRecord:
        """`record` and the share of masked ranks."""
        lack = 0.0 if self.ranks is None else self.ranks.lack()
        return replace(record, flags=record.flags | lack_bits(lack)) if lack else record

    @property
    def masked_ranks(self) -> dict[str, str]:
        """Ranks with experts that steps do without, and why."""
        return {} if self.ranks is None else self.ranks.missing()

    def state(self) -> dict[str, Any]:
        """For /debug/state. Recounts every block: `integrity` is None if all counts agree."""
        return {
            "blocks": self.pool.usage(),
            "groups": self.pool.usage_by_group(),
            "references": self.pool.references(),
            "integrity": self._integrity(),
            "held_for_requests": self.service.held() | {"moving": len(self.migrator)},
            "waiting": len(self.batcher.waiting),
            "running": len(self.batcher.running),
            "preemptions": self.batcher.num_preemptions,
            "kernels": self.worker.runner.model.kernels(),
            "experts": self.experts,
            "speculation": self.speculator and self.speculator.state(),
            "draft_model": self.draft and self.draft.state(),
            "mixed_step": {
                "coefficients": self.costs.mixed.coefficients,
                "error": self.costs.mixed.error,
            },
            "idle_checks": self._checks.state(),
            "beyond_memory": None if self.beyond is None else self.beyond.state(),
            "offload": None if self.offload is None else self.offload.state(),
            "pool_forms": self._pool_blocks.state() if isinstance(self._pool_blocks, ChosenBlocks) else None,
            "publish_backlog": self.publisher.backlog,
            "publish_dropped": self.publisher.num_dropped,
        }

    def _integrity(self) -> str | None:
        try:
            self.pool.check_integrity()
            self.pool.check_transfer_owners(
                [*self.worker.held_blocks(), *self.service.held_blocks(), *self.migrator.held_blocks()]
            )
            lent = (*self._calibrated, *self._checks.lent)
            self.pool.check_request_owners([*self.worker.request_blocks(), *lent])
            for request in self.batcher.requests.values():
                self.batcher.blocks.check_groups(request)
        except Exception as error:
            return str(error)
        return None


def pool_blocks(
    store: Store,
    arena: Region | DeviceRegion,
    geometry: BlockGeometry,
    staging_bytes: int,
    pooled: BlockGeometry | None = None,
    rounding: Rounding | None = None,
) -> PoolBlocks:
    """Moves blocks between `arena` and the pool; staging_bytes: size of each area in which they are encoded or
    converted; pooled: the blocks of the pool, if they are not like those of `geometry`; rounding: of geometries that
    are rounded when it pays."""
    if isinstance(arena, DeviceRegion):
        return DeviceBlocks(store, arena, geometry)
    if pooled is not None:
        return UnlikeBlocks(store, arena, geometry, pooled, staging_bytes)
    if rounding is not None:
        return ChosenBlocks(store, arena, geometry, staging_bytes, rounding.pays)
    if geometry.encoded:
        return EncodedBlocks(store, arena, geometry, staging_bytes)
    return PlainBlocks(store, arena.name, geometry)


def layers_of(blocks: PoolBlocks) -> Layers | None:
    """Loads blocks layer by layer. None for a device: kernels that are already queued do not wait for layers."""
    return blocks.layers if isinstance(blocks, PlainBlocks | EncodedBlocks) else None
