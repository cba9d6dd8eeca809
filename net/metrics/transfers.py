"""Transfers per peer in the exposition format, read from the engine at each scrape, without cost for submissions.

A snapshot handles the notices of the peers, so `read` takes it on the event loop; a thread writes the exposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from net.transfer.common.traffic import LATENCY_BUCKETS_S


class TransferCollector(Collector):
    """`labels`: on every metric; `snapshot`: net.transfer.engine.TransferEngine.snapshot."""

    def __init__(self, labels: Mapping[str, str], snapshot: Callable[[], list[dict[str, Any]]]) -> None:
        self._labels = labels
        self._snapshot = snapshot
        self._rows: list[dict[str, Any]] = []

    def read(self) -> None:
        """On the event loop."""
        self._rows = self._snapshot()

    def collect(self) -> Iterable[Metric]:
        common = [*self._labels, "peer", "transport"]
        moved = CounterMetricFamily(
            "mooncake:peer_transfer_bytes", "Bytes moved to or from the peer", labels=[*common, "direction"]
        )
        speed = GaugeMetricFamily(
            "mooncake:peer_transfer_gb_per_s", "Mean bandwidth of all submissions, GB/s", labels=common
        )
        failed = CounterMetricFamily("mooncake:peer_transfer_failures", "Failed transfer submissions", labels=common)
        again = CounterMetricFamily(
            "mooncake:peer_transfer_retries", "Slices sent again after a failure", labels=common
        )
        latency = HistogramMetricFamily(
            "mooncake:peer_transfer_latency_seconds", "Time per transfer submission", labels=common
        )
        text = "1 for the transport in use; the label says why no better one is"
        path = GaugeMetricFamily("mooncake:peer_path", text, labels=[*common, "why"])
        per_rail = [*common, "rail"]
        rail_speed = GaugeMetricFamily(
            "mooncake:rail_gb_per_s", "Estimated bandwidth of the rail, GB/s", labels=per_rail
        )
        rail_up = GaugeMetricFamily("mooncake:rail_up", "1 while the rail is usable", labels=per_rail)
        rail_moved = CounterMetricFamily("mooncake:rail_bytes", "Bytes that arrived over the rail", labels=per_rail)
        rail_failed = CounterMetricFamily(
            "mooncake:rail_failures", "Number of times that the rail broke", labels=per_rail
        )
        for row in self._rows:
            values = [*self._labels.values(), row["peer"], row["transport"] or "none"]
            for rail in row["rails"]:
                rail_speed.add_metric([*values, rail["rail"]], rail["gb_per_s"])
                rail_up.add_metric([*values, rail["rail"]], float(rail["up"]))
                rail_moved.add_metric([*values, rail["rail"]], rail["bytes"])
                rail_failed.add_metric([*values, rail["rail"]], rail["failures"])
            path.add_metric([*values, row["why"] or "no path is open"], 1)
            moved.add_metric([*values, "read"], row["bytes_read"])
            moved.add_metric([*values, "write"], row["bytes_written"])
            speed.add_metric(values, row["gb_per_s"])
            failed.add_metric(values, row["failures"])
            again.add_metric(values, row["retries"])
            bounds = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
            counts = accumulate(row["latencies"])
            latency.add_metric(values, list(zip(bounds, counts, strict=True)), row["seconds"])
        return [path, moved, speed, failed, again, latency, rail_speed, rail_up, rail_moved, rail_failed]
