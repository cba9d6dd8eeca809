"""The parts of a node that a scrape reads (net/metrics/watched.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.front.cluster import Cluster
from engine.node.parts import Blocks
from net.metrics.events import Metrics
from net.metrics.watched import (
    of_coder,
    of_experts,
    of_gossip,
    of_load_words,
    of_offload,
    of_store,
    of_tenants,
    of_tiers,
)

if TYPE_CHECKING:
    from engine.node.engine import Engine


def watch(metrics: Metrics, cluster: Cluster, blocks: Blocks) -> None:
    """Register the parts with the metrics. Called once, when the node has all its parts."""
    gossip = cluster.gossip

    def oldest_record_s() -> float:
        return max((record.age_s for record in gossip.records.values()), default=0.0)

    metrics.watch_transfers(cluster.transfer.snapshot)
    metrics.watch(of_coder(cluster.transfer.coded))
    metrics.watch(of_load_words(cluster.words.counters))
    metrics.watch(of_gossip(gossip.traffic, lambda: gossip.counters, gossip.lost, oldest_record_s))
    metrics.watch(of_store(cluster.store.stats))
    if blocks.share is not None:
        metrics.watch(of_tiers(blocks.share.stats, blocks.geometry.pool_bytes))
        metrics.watch(of_tenants(blocks.share.tenants))


def watch_engine(metrics: Metrics, engine: Engine) -> None:
    """The same for the parts of the engine, once it has loaded."""
    if engine.experts is not None:
        metrics.watch(of_experts(lambda: engine.experts or {}))
    if engine.offload is not None:
        metrics.watch(of_offload(engine.offload.state))
