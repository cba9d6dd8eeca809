"""Prometheus metrics of a node: vLLM's names if vLLM has the metric, `mooncake:` for the others.

net/metrics/table.py declares them. The node calls `count` and `observe` when something happens; the owner of a state
calls `set` for its gauges before a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from net.loop.stalls import SLOW_S, Stall
from net.metrics.table import ALIASES, Declared, declared
from net.metrics.transfers import TransferCollector
from net.metrics.watched import Aliases, Watched, WatchedCollector


class Metrics:
    """One node's metrics in a separate registry, so that several nodes fit into one process (tests, simulator).

    Every metric has the labels model_name and engine (the node id). Times are seconds, measured with one
    monotonic clock in one process.
    """

    def __init__(self, model_name: str, engine: str, max_model_len: int = 1 << 17) -> None:
        """max_model_len: the upper end of the buckets of token counts."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for metric in declared(max_model_len):
            self._add(metric)
        aliases = {alias: (self._metrics[name], f"The same as {name}") for alias, name in ALIASES.items()}
        self.registry.register(Aliases(aliases))
        self._transfers: list[TransferCollector] = []
        self._watched = WatchedCollector(self._labels)
        self.registry.register(self._watched)

    def text(self) -> bytes:
        """The metrics in Prometheus's exposition format. Call `read` first. May run in a thread."""
        return generate_latest(self.registry)

    # --- one metric

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Increase a counter. Raises KeyError for a name that is not declared."""
        self._child(name, **labels).inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram. Raises KeyError for a name that is not declared."""
        self._child(name, **labels).observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises KeyError for a name that is not declared."""
        self._child(name, **labels).set(value)

    # --- several metrics

    def set_load(self, running: int, waiting: int, kv_usage: float) -> None:
        """running, waiting: requests on this node; kv_usage: fraction of KV blocks in use, 0..1."""
        self._child("vllm:num_requests_running").set(running)
        self._child("vllm:num_requests_waiting").set(waiting)
        self._child("vllm:kv_cache_usage_perc").set(kv_usage)

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """Publish resolved cache settings (block_size, num_gpu_blocks, cache_dtype, ...) as labels."""
        labels = {name: str(value) for name, value in config.items()}
        name = "vllm:cache_config_info"
        if name in self._metrics:
            self.registry.unregister(self._metrics[name])
        gauge = Gauge(name, "Resolved cache settings", [*self._labels, *labels], registry=self.registry)
        self._metrics[name] = gauge
        gauge.labels(**self._labels, **labels).set(1)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """One request's draft was verified in a step."""
        self._child("vllm:spec_decode_num_drafts").inc()
        self._child("vllm:spec_decode_num_draft_tokens").inc(drafted)
        self._child("vllm:spec_decode_num_accepted_tokens").inc(accepted)
        for position in range(accepted):
            self._child("vllm:spec_decode_num_accepted_tokens_per_pos", position=str(position)).inc()

    # --- requests

    def observe_ttft(self, seconds: float, service_class: str) -> None:
        """Arrival to first token."""
        self._child("vllm:time_to_first_token_seconds").observe(seconds)
        self._child("mooncake:time_to_first_token_seconds", service_class=service_class).observe(seconds)

    def observe_itl(self, seconds: float, service_class: str) -> None:
        """Time between two successive tokens of one request."""
        self._child("vllm:inter_token_latency_seconds").observe(seconds)
        self._child("mooncake:inter_token_latency_seconds", service_class=service_class).observe(seconds)

    def finish_request(
        self, reason: str, e2e_s: float, prompt_tokens: int, output_tokens: int, decode_s: float
    ) -> None:
        """A request ended on its acceptor with finish_reason `reason` (stop, length, abort).

        e2e_s: arrival to last token; decode_s: first to last token, from which the time per output token follows.
        """
        self._child("vllm:request_success", finished_reason=reason).inc()
        self._child("vllm:e2e_request_latency_seconds").observe(e2e_s)
        self._child("vllm:request_prompt_tokens").observe(prompt_tokens)
        self._child("vllm:request_generation_tokens").observe(output_tokens)
        if output_tokens > 1:
            per_token = decode_s / (output_tokens - 1)
            self._child("vllm:request_time_per_output_token_seconds").observe(per_token)

    # --- the cluster, transfers, the pooled store

    def watch_transfers(self, snapshot: Callable[[], list[dict[str, Any]]]) -> None:
        """Add the transfer engine's rows per peer (net.transfer.engine.TransferEngine.snapshot), as of the last
        `read`."""
        self._transfers.append(TransferCollector(self._labels, snapshot))
        self.registry.register(self._transfers[-1])

    def watch(self, metrics: Iterable[Watched]) -> None:
        """Add metrics that other parts count (net/metrics/watched.py), as of the last `read`."""
        self._watched.add(metrics)

    def read(self) -> None:
        """Read the values of all watched metrics and transfers. Call it on the event loop before a scrape."""
        self._watched.read()
        for transfers in self._transfers:
            transfers.read()

    def count_transfer(self, direction: str, transport: str, nbytes: int, seconds: float) -> None:
        """One finished submission. direction: read or write; transport: local, shm, tcp, ..."""
        labels = {"direction": direction, "transport": transport}
        self._child("mooncake:transfer_bytes", **labels).inc(nbytes)
        self._child("mooncake:transfer_seconds", **labels).inc(seconds)

    def count_prefix_load(self, blocks_by_tier: Mapping[str, int], missed_blocks: int) -> None:
        """Blocks of a prefix: found ones by tier (dram or ssd of the pool, arena of another node), and missing ones."""
        for tier, blocks in blocks_by_tier.items():
            self._child("mooncake:store_hit_blocks", tier=tier).inc(blocks)
        self._child("mooncake:store_missed_blocks").inc(missed_blocks)

    def observe_stall(self, stall: Stall) -> None:
        """Wait of a sampled callback for the event loop; for long waits also the cause."""
        self._child("mooncake:event_loop_stall_seconds").observe(stall.late)
        if stall.late > SLOW_S:
            for cause in ("computing", "core", "lock"):
                self._child("mooncake:event_loop_long_stall_seconds", cause=cause).inc(getattr(stall, cause))

    # --- registration

    def _child(self, name: str, **labels: str) -> Any:
        """The child with these labels, kept because every token needs three of them."""
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[name].labels(**self._labels, **labels)
        return child

    def _add(self, one: Declared) -> None:
        options = {} if one.buckets is None else {"buckets": one.buckets}
        labels = [*self._labels, *one.labels]
        metric = self._metrics[one.name] = one.kind(one.name, one.text, labels, registry=self.registry, **options)
        if not one.labels:
            metric.labels(**self._labels)  # exported as 0 before the first event, so that rates have a start
