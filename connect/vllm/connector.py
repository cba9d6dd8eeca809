"""PoolConnector: vLLM's KVConnectorBase_V1 on our pool; the only module that needs vLLM. It translates vLLM's types:
what is decided is in planner.py, what moves in worker.py.

vLLM makes one object in its scheduler and one in each worker, and calls each half's methods of one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import vllm
from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine

from connect.vllm import counts
from connect.vllm.identity import fingerprint, root_of
from connect.vllm.layout import NotSupported
from connect.vllm.options import Options
from connect.vllm.planner import Row
from connect.vllm.pool import Pool
from connect.vllm.scheduling import Scheduling
from connect.vllm.work import StepWork
from connect.vllm.worker import Worker

log = logging.getLogger("mooncake.connect")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers."""

    work: StepWork


@dataclass
class PoolStats(KVConnectorStats):
    """The counters of one interval: connect/vllm/counts.py."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = counts.added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return counts.shown(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PoolMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of connect/vllm/counts.py."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[PromCounter](f"vllm:mooncake_{name}", documentation=meaning, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, meaning in counts.MEANINGS.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class PoolConnector(KVConnectorBase_V1):
    """Options: connect/vllm/options.py."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ValueError for options and models that are not supported, ClusterError when no node answers."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_with_vllm()
        transfer = self._kv_transfer_config
        self._options = options = Options.of(transfer.kv_role, transfer.kv_connector_extra_config)
        _check(vllm_config, kv_cache_config)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        pool = Pool(options.master)
        self._scheduling: Scheduling | None = None
        self._worker: Worker | None = None
        self._failed_blocks: set[int] = set()
        self._waiting_for_peer = options.role == "kv_consumer"
        if role == KVConnectorRole.SCHEDULER:
            root = _root(vllm_config, kv_cache_config, options)
            log.info("keys of this engine begin with the root %s", root.hex())
            self._scheduling = Scheduling(pool, root, vllm_config.cache_config.block_size, options, ranks)
        else:
            self._worker = Worker(pool, options, vllm_config.parallel_config.rank % ranks, ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a block is copied in the step that completes it, so a preemption takes nothing away."""
        return False

    # --- in the scheduler

    @property
    def _half(self) -> Scheduling:
        assert self._scheduling is not None
        return self._scheduling

    def on_new_request(self, request: Any) -> None:
        if request.mm_features or request.prompt_embeds is not None or request.resumable:
            return  # its tokens do not name its KV, or may be taken back
        if request.skip_reading_prefix_cache:
            return  # the client wants it computed
        params = request.kv_transfer_params or {}
        waits = params.get("do_remote_prefill", self._waiting_for_peer and not params.get("do_remote_decode"))
        salt = json.dumps([request.cache_salt, _adapter(request.lora_request)])
        wait_blocks = params.get("pool_blocks") if waits else 0
        self._half.arrived(request.request_id, request.all_token_ids, salt, wait_blocks)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._half.match(request.request_id, num_computed_tokens)
        return found.tokens, found.background

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._half.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """HOST: in DRAM of any node of the pool; DISK: on its SSD."""
        dram, disk = self._half.sources(request.request_id, num_external_tokens)
        sources = {CacheHitSource.HOST: dram, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        computed = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks = scheduler_output.kv_connector_block_state
        rows = [Row(name, computed[name], count, blocks.get_block_ids(name)[0]) for name, count in scheduled.items()]
        return StepMetadata(self._half.step(rows))

    def update_connector_output(self, connector_output: Any) -> None:
        self._half.load_failed(connector_output.invalid_block_ids or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing keeps the engine's blocks. A request that another engine continues gets its parameters."""
        blocks = self._half.finished(request.request_id)
        asked = (request.kv_transfer_params or {}).get("do_remote_decode", self._options.role == "kv_producer")
        if not asked:
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "pool_blocks": blocks,
            "remote_engine_id": self._kv_transfer_config.engine_id,
            "remote_request_id": request.request_id,
        }

    def reset_cache(self) -> bool:
        self._half.reset()
        return True

    # --- in a worker

    @property
    def _hands(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def _work(self) -> StepWork:
        work: StepWork = self._get_connector_metadata().work
        return work

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._hands.attach(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The blocks of the step may be written from here on. Loads begin, also those that the step does not need:
        vLLM calls start_load_kv for them when the step is over, so they would miss its end."""
        super().bind_connector_metadata(connector_metadata)
        self._hands.begin(self._work)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """They have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._hands.layer_ready(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._hands.layer_done(layer_name)

    def wait_for_save(self) -> None:
        self._hands.end(self._work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended, self._failed_blocks = self._hands.take_ended()
        return None, ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those found by the call of get_finished before: a request and its failures are told together."""
        return self._failed_blocks

    # --- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._scheduling or self._worker
        assert half is not None
        taken = half.take_counts()
        return PoolStats(data=dict(taken)) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Python runs at each layer."""
        return True

    def shutdown(self) -> None:
        half = self._scheduling or self._worker
        assert half is not None
        half.close()


def _log_with_vllm() -> None:
    """Our lines appear in vLLM's log, unless the process has a log for them."""
    ours, theirs = logging.getLogger("mooncake"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)


def _check(config: Any, kv_cache_config: Any) -> None:
    """Raises NotSupported."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise NotSupported("pipeline parallelism: a block of the pool has all layers")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise NotSupported(f"{name} is above 1")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise NotSupported("the model has several groups of KV caches: start with --disable-hybrid-kv-cache-manager")


def _adapter(lora: Any) -> list[str] | None:
    return None if lora is None else [lora.lora_name, lora.lora_path]


def _root(config: Any, kv_cache_config: Any, options: Options) -> bytes:
    """Everything that makes the bytes of a block: another value of any of it is another root."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    described = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    weights = options.model_id or fingerprint(model.model) or [model.model, model.revision]
    return root_of(
        {
            "engine": ["vllm", vllm.__version__],
            "weights": weights,
            "model": described,
            "quantization": model.quantization,
            "dtype": str(model.dtype),
            "kv dtype": cache.cache_dtype,
            "block size": cache.block_size,
            "layout": [str(kv_cache_config.kv_cache_layout), _packing(config)],
            "layers": [name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers],
            "ranks": parallel.tensor_parallel_size,
            "salt": options.salt,
        }
    )


def _packing(config: Any) -> str:
    """vLLM's CPU kernels order the bytes of keys by instruction set (AMX, AVX-512, ...)."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # not at the top: other platforms lack it

    model, cache = config.model_config, config.cache_config
    packing: str = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return packing
