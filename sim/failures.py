"""Faults at work in a cluster: what is lost, who notices when, and where lost requests go.

A crash loses the node's requests, its cache and its share of the pool. After `detect_s` nobody places on it any more
and the acceptors send its requests elsewhere: the prompt and the tokens that were already answered are computed again.
A request that is placed on a dead node before that is tried again every `retry_s`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sim.faults import Fault, drawn, parse
from sim.job import Job
from sim.node import Node

if TYPE_CHECKING:
    from sim.cluster import Cluster


class Failures:
    """Of one run; `slowness` and `known_slowness` are by node: as it is, as the others know."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.slowness = [1.0] * len(cluster.nodes)
        self.lost = 0  # attempts that a crash ended

    def schedule(self, until: float) -> None:
        """All faults up to `until`. Raises ValueError naming the flag."""
        config, loop = self._cluster.config, self._cluster.loop
        names = [node.name for node in self._cluster.nodes]
        if config.crash_every_s < 0 or config.crash_down_s <= 0 or not 0 <= config.gossip_loss < 1:
            raise ValueError("--crash-every-s must not be negative, --crash-down-s positive, --gossip-loss below 1")
        by_seed = drawn(names, config.crash_every_s, config.crash_down_s, until, config.seed)
        for fault in [*parse(config.faults, names), *by_seed]:
            node = self._cluster.by_name[fault.node]
            if fault.kind == "crash":
                loop.at(fault.at, self._crash, node, fault)
            elif fault.kind == "rail":
                slowness = self._cluster.network.slowness
                loop.at(fault.at, slowness.__setitem__, node.name, fault.factor)
                loop.at(fault.at + fault.seconds, slowness.__setitem__, node.name, 1.0)
            else:
                loop.at(fault.at, self._slow, node, fault.factor)
                loop.at(fault.at + fault.seconds, self._slow, node, 1.0)

    # --- slow nodes

    def _slow(self, node: Node, factor: float) -> None:
        self.slowness[node.index] = factor
        self._cluster.loop.after(self._cluster.config.detect_s, self._slow_known, node, factor)

    def _slow_known(self, node: Node, factor: float) -> None:
        """Its records say so, as those of nodes do whose steps take longer than their models say."""
        live = self._cluster.live
        live.prefill[:, node.index] = np.array(self._cluster.model.prefill) * factor
        node.known_slowness = factor
        self._cluster.changed(node)

    # --- crashes

    def _crash(self, node: Node, fault: Fault) -> None:
        cluster, now = self._cluster, self._cluster.loop.now
        node.crash()
        cluster.caches[node.index].clear()
        cluster.pool.lost(node.index)
        cluster.loop.after(cluster.config.detect_s, self._noticed, node, now)
        cluster.loop.at(fault.at + max(fault.seconds, cluster.config.detect_s), self._back, node)

    def _noticed(self, node: Node, crashed: float) -> None:
        live = self._cluster.live
        live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
        live.prefills[node.index] = live.decodes[node.index] = False
        live.closed_decode[node.index] = np.inf
        self._cluster.placing.intents.drop(node.name)
        self._cluster.changed(node)
        for job in self._cluster.jobs:
            if job.sent <= crashed and not job.refused and math.isnan(job.finished) and self._is_lost(job, node):
                self._again(job, crashed)

    def _is_lost(self, job: Job, node: Node) -> bool:
        decode = self._cluster.by_name[job.decode]
        return decode is node or (job.prefill == node.name and job not in decode.batch)

    def _again(self, job: Job, crashed: float) -> None:
        for name in (job.prefill, job.decode):
            self._cluster.by_name[name].cancel(job)
        self.lost += 1
        job.restart(crashed)
        self._cluster.place(job)

    def _back(self, node: Node) -> None:
        live = self._cluster.live
        self._cluster.pool.back(node.index)
        # New columns here too: what was gossiped while the node was down shares the old ones.
        live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
        live.prefills[node.index] = "prefill" in node.roles
        live.decodes[node.index] = "decode" in node.roles
        live.closed_decode[node.index] = 0.0 if "decode" in node.roles else np.inf
        node.down = False
        self._cluster.changed(node)
