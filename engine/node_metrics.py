"""Which parts of a node a scrape reads (net/watched_metrics.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from net.watched_metrics import of_gossip, of_load_words, of_store, of_tiers

if TYPE_CHECKING:
    from engine.node import Node


def watch(node: Node) -> None:
    """Called once, when the node has all its parts."""
    metrics, gossip, share = node.metrics, node.gossip, node.share

    def oldest_record_s() -> float:
        return max((record.age_s for record in gossip.records.values()), default=0.0)

    metrics.watch_transfers(node.transfer.snapshot)
    metrics.watch(of_load_words(node.words.counters))
    metrics.watch(of_gossip(gossip.traffic, lambda: gossip.counters, gossip.lost, oldest_record_s))
    metrics.watch(of_store(node.store.stats))
    if share is not None:
        metrics.watch(of_tiers(share.stats, node.geometry.pool_bytes))
