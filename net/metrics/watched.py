"""Metrics that another part already counts: read from their owner at each scrape, without cost between scrapes.

Owners run on the event loop, but a thread writes the exposition; therefore `read` takes the values first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Rows = Iterable[tuple[Sequence[str], float]]
"""(values of the metric's own labels, value)"""

TIER_EVENTS = ("hits", "misses", "writes", "evictions", "refused", "corrupt", "failures", "renewals")
TIER_TROUBLES = ("stalled", "failing", "closed")
STORE_FAULTS = {"corrupt": "damaged", "home_failures": "home"}


@dataclass(frozen=True, slots=True)
class Watched:
    """One metric. `name`: as in the exposition, but without the _total of a counter."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Callable[[], Rows]


class WatchedCollector(Collector):
    """Returns the values of the last `read`. `common`: labels of every metric of the node."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = common
        self._metrics: list[Watched] = []
        self._families: list[Metric] = []

    def add(self, metrics: Iterable[Watched]) -> None:
        self._metrics += metrics

    def read(self) -> None:
        """On the event loop."""
        self._families = [self._family(metric) for metric in self._metrics]

    def collect(self) -> Iterable[Metric]:
        return self._families

    def _family(self, metric: Watched) -> Metric:
        family = metric.kind(metric.name, metric.text, labels=[*self._common, *metric.labels])
        for labels, value in metric.rows():
            family.add_metric([*self._common.values(), *labels], value)
        return family


class Aliases(Collector):
    """Other names of registered metrics, for older dashboards and routers."""

    def __init__(self, metrics: Mapping[str, tuple[Any, str]]) -> None:
        """alias -> (a metric of prometheus_client, its help text)."""
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for alias, (metric, text) in self._metrics.items():
            for family in metric.collect():
                renamed = Metric(alias, text, family.type)
                renamed.samples = [
                    sample._replace(name=alias + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield renamed


def of_load_words(counters: Mapping[str, int]) -> list[Watched]:
    """counters: net.gossip.load_words.LoadWords.counters, with names such as read_one_sided."""

    def rows() -> Rows:
        for name, count in sorted(counters.items()):
            operation, _, way = name.partition("_")
            yield (operation, way or "one_sided"), count

    text = "Load queries to other nodes (read, asked) and claims on them, by operation and way"
    return [Watched(CounterMetricFamily, "mooncake:load_words", text, ("operation", "way"), rows)]


def of_coder(coded: Callable[[], Mapping[str, Mapping[str, float]]]) -> list[Watched]:
    """coded: net.transfer.engine.TransferEngine.coded."""

    def rows(name: str) -> Callable[[], Rows]:
        return lambda: [((label,), value) for label, value in coded().get(name, {}).items()]

    def moved() -> Rows:
        for direction in ("sent", "received"):
            yield from (((direction, form), value) for form, value in coded().get(direction, {}).items())

    counter = CounterMetricFamily
    return [
        Watched(counter, "mooncake:wire_codec_bytes", "Bytes of coded frames (--wire-codec): raw, and as they went "
                "over the wire",
                ("direction", "form"), moved),
        Watched(counter, "mooncake:wire_codec_frames", "Frames sent to peers with a coder, coded, and raw because "
                "coding them would not pay",
                ("form",), rows("frames")),
        Watched(counter, "mooncake:wire_codec_seconds", "Time of this node in the coder, by work: encode, decode",
                ("work",), rows("seconds")),
    ]  # fmt: skip


def of_gossip(
    traffic: Mapping[str, tuple[int, int]],
    counters: Callable[[], Mapping[str, int]],
    lost: Mapping[str, int],
    oldest_s: Callable[[], float],
) -> list[Watched]:
    """traffic: direction -> (packets, bytes); counters: net.gossip.driver.Gossip.counters; lost: lost members by
    reason; oldest_s: age in seconds of the oldest load record."""

    def events() -> Rows:
        return [((name,), count) for name, count in sorted(counters().items()) if name != "local_health"]

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    return [
        Watched(counter, "mooncake:gossip_packets", "UDP packets of gossip", ("direction",),
                lambda: [((way,), packets) for way, (packets, _) in traffic.items()]),
        Watched(counter, "mooncake:gossip_bytes", "Payload of the gossip packets, without IP and UDP headers",
                ("direction",),
                lambda: [((way,), size) for way, (_, size) in traffic.items()]),
        Watched(counter, "mooncake:gossip_events", "Gossip events: failed probes, suspicions, refutations, "
                "dropped packets and others",
                ("event",), events),
        Watched(gauge, "mooncake:gossip_local_health", "Local health score of this node (Lifeguard): 0 is "
                "healthy, higher is worse",
                (), lambda: [((), counters().get("local_health", 0))]),
        Watched(gauge, "mooncake:gossip_oldest_record_seconds", "Age of the oldest load record of a living node",
                (), lambda: [((), oldest_s())]),
        Watched(counter, "mooncake:members_lost", "Members lost, by reason: dead, left, restarted", ("reason",),
                lambda: [((reason,), count) for reason, count in sorted(lost.items())]),
    ]  # fmt: skip


def of_tiers(stats: Callable[[], Mapping[str, Mapping[str, Any]]], slot_bytes: int) -> list[Watched]:
    """stats: cache.tiers.local_store.LocalStore.stats of this node's share of the pool, by tier; slot_bytes: size of
    one block."""

    def sizes(field: str, unit: int) -> Callable[[], Rows]:
        return lambda: [((tier,), row[field] * unit) for tier, row in stats().items()]

    def events() -> Rows:
        for tier, row in stats().items():
            yield from (((tier, name), row[name]) for name in TIER_EVENTS if name in row)

    def troubles() -> Rows:
        for tier, row in stats().items():
            yield from (((tier, name), row[name]) for name in TIER_TROUBLES if name in row)

    def figures(field: str) -> Callable[[], Rows]:
        return lambda: [((tier,), row[field]) for tier, row in stats().items() if field in row]

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    return [
        Watched(gauge, "mooncake:store_used_bytes", "Bytes used in this node's share of the pool", ("tier",),
                sizes("bytes", 1)),
        Watched(gauge, "mooncake:store_capacity_bytes", "Size of this node's share of the pool", ("tier",),
                sizes("capacity", slot_bytes)),
        Watched(counter, "mooncake:store_tier_events", "Events of this share, by tier: blocks found, missing, "
                "written, evicted, refused by admission or damaged; failed disk operations; tiers started empty after "
                "damage",
                ("tier", "event"), events),
        Watched(gauge, "mooncake:store_disk_trouble", "1 while the disk of the tier hangs, fails, or could not be "
                "reopened after damage", ("tier", "trouble"), troubles),
        Watched(gauge, "mooncake:store_pinned_blocks", "Blocks of this share that are never evicted", ("tier",),
                figures("pinned")),
        Watched(gauge, "mooncake:store_unwritten_blocks", "Blocks that the disk rejected; the tier will retry them",
                ("tier",), figures("unwritten")),
    ]  # fmt: skip


def of_tenants(stats: Callable[[], Mapping[str, Mapping[str, int | None]]]) -> list[Watched]:
    """stats: cache.tiers.local_store.LocalStore.tenants of this node's share of the pool."""

    def figures(field: str) -> Callable[[], Rows]:
        return lambda: [((tenant,), value) for tenant, row in stats().items() if (value := row[field]) is not None]

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    return [
        Watched(gauge, "mooncake:store_tenant_bytes", "Bytes that a tenant of --tenants has in this node's share, in "
                "any tier, in whole slots; 'other': everything else", ("tenant",), figures("bytes")),
        Watched(gauge, "mooncake:store_tenant_quota_bytes", "Bytes that the tenant may have in this node's share",
                ("tenant",), figures("quota")),
        Watched(counter, "mooncake:store_tenant_refusals", "Blocks refused because the tenant has reached its quota",
                ("tenant",), figures("refused")),
    ]  # fmt: skip


def of_store(stats: Callable[[], Mapping[str, Any]]) -> list[Watched]:
    """stats: cache.store.store.Store.stats of this node's use of the pool."""

    def faults() -> Rows:
        now = stats()
        return [((name,), now[field]) for field, name in STORE_FAULTS.items() if field in now]

    text = "Blocks that arrived damaged and were dropped; failed calls to homes"
    return [Watched(CounterMetricFamily, "mooncake:store_faults", text, ("fault",), faults)]


def of_experts(state: Callable[[], Mapping[str, Any]]) -> list[Watched]:
    """state: engine.experts.processes.ExpertProcesses.state of a node with --expert-parallel-size."""

    def masked() -> Rows:
        now = state()
        return [((str(rank),), float(str(rank) in now["masked"])) for rank in range(now.get("ranks", 0))]

    def each(field: str) -> Callable[[], Rows]:
        return lambda: [((str(place),), count) for place, count in enumerate(state().get(field, ()))]

    def one(field: str) -> Callable[[], Rows]:
        return lambda: [((), state().get(field, 0))]

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    return [
        Watched(gauge, "mooncake:expert_rank_masked", "1 while steps do without the experts of this rank", ("rank",),
                masked),
        Watched(gauge, "mooncake:expert_ranks", "Ranks that share the experts now", (), one("width")),
        Watched(counter, "mooncake:expert_pairs", "(token, expert) pairs that each rank was asked for", ("rank",),
                each("pairs_by_rank")),
        Watched(counter, "mooncake:expert_choices", "Choices of an expert by its number, over all layers", ("expert",),
                each("choices_by_expert")),
        Watched(counter, "mooncake:expert_ranks_masked", "How often a rank with experts was given up", (),
                one("times_masked")),
        Watched(counter, "mooncake:expert_dropped_pairs", "(token, expert) pairs without a result", (),
                one("dropped_pairs")),
        Watched(counter, "mooncake:expert_moves", "Experts copied to another rank for balance", (),
                one("moved_experts")),
        Watched(counter, "mooncake:expert_wait_seconds", "Time for which rank 0 waited for other ranks", (),
                one("waited_s")),
    ]  # fmt: skip


def of_offload(state: Callable[[], Mapping[str, Any]]) -> list[Watched]:
    """state: StreamedLayers.state (engine/offload/streamed.py) of a node that reads weights in every pass."""

    def one(field: str) -> Callable[[], Rows]:
        return lambda: [((), state().get(field, 0))]

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    return [
        Watched(gauge, "mooncake:offload_layers", "Layers whose weights are read from disk in every pass", (),
                one("streamed_layers")),
        Watched(gauge, "mooncake:offload_memory_bytes", "Memory of weights, and of buffers for those that are read", (),
                one("memory_bytes")),
        Watched(counter, "mooncake:offload_passes", "Passes of the model that read weights", (), one("passes")),
        Watched(counter, "mooncake:offload_read_bytes", "Weights read from disk", (), one("bytes_read")),
        Watched(counter, "mooncake:offload_wait_seconds", "Time for which layers waited for their weights", (),
                one("waited_s")),
    ]  # fmt: skip


def of_traces(lost: Callable[[], int], sent: Callable[[], int]) -> list[Watched]:
    """Metrics of --otlp-traces-endpoint."""
    counter = CounterMetricFamily
    return [
        Watched(counter, "mooncake:otlp_lost_traces", "Requests whose trace did not reach the collector", (),
                lambda: [((), lost())]),
        Watched(counter, "mooncake:otlp_spans", "Spans that the OpenTelemetry collector accepted", (),
                lambda: [((), sent())]),
    ]  # fmt: skip
