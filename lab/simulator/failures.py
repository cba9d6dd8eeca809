"""Faults in a cluster: which parts are lost, which node notices when, and where lost requests go.

A crash loses the node's requests, its arena and its share of the pool. After `detect_s`, or with --gossip-model real
when the cores of all other nodes know, no acceptor places on it any more, and the acceptors send its requests to other
nodes, which compute the prompt and the tokens answered so far again. A request that is placed on a dead node before
that is tried again every `retry_s`.

A node that lost a rank with experts (--expert-ranks W) and has copies of all of them goes on, W / (W - M) times as slow
with M ranks away, which is what placement multiplies the times of real nodes by (sched/placement/record_table.py). With
no more copies than ranks away it serves nobody, because nearly every token needs an expert that has no living copy;
the named blocks in its arena stay. Room for KV does not shrink here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.simulator.config import SimConfig
from lab.simulator.faults import Fault, drawn, parse
from lab.simulator.job import Job
from lab.simulator.models.gossip import WATCH_S, Gossip
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from lab.simulator.models.pool import Pool
from lab.simulator.models.shares import HomedPool
from lab.simulator.node import Node
from lab.simulator.placing import Placing


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the cluster that a fault changes."""

    nodes: Mapping[str, Node]
    network: Network
    placing: Placing
    pool: Pool | HomedPool


class Failures:
    """The failures of one run. `slowness` has the true factor of each node; other nodes know its `known_slowness`."""

    def __init__(
        self,
        config: SimConfig,
        loop: Loop,
        parts: Parts,
        jobs: Sequence[Job],
        changed: Callable[[Node], None],
        place: Callable[[Job], None],
        slowness: list[float],
    ) -> None:
        """jobs: all so far; changed(node): its columns may be outdated; place: place a request on nodes;
        slowness: the true factor of each node, changed here."""
        self._config, self._loop, self._parts = config, loop, parts
        self._jobs, self._changed, self._place = jobs, changed, place
        self.slowness = slowness
        self._away = [0] * len(slowness)  # lost ranks of each node that serves
        self._crashes = [0] * len(slowness)
        self._slowed = [1.0] * len(slowness)  # by slow: faults
        self.lost = 0  # attempts that a crash ended

    def schedule(self, until: float) -> None:
        """All faults up to `until`. Raises ValueError naming the flag."""
        config, loop, slowness = self._config, self._loop, self._parts.network.slowness
        names = list(self._parts.nodes)
        named = parse(config.faults, names)
        if not config.expert_ranks and any(fault.kind == "rank" for fault in named):
            raise ValueError(f"--faults {config.faults}: nodes have ranks with --expert-ranks only")
        crashes = drawn(names, config.crash_every_s, config.crash_down_s, until, config.seed)
        ranks = drawn(names, config.rank_loss_every_s, config.rank_down_s, until, config.seed, "rank")
        for fault in [*named, *crashes, *ranks]:
            node = self._parts.nodes[fault.node]
            if fault.kind == "crash":
                loop.at(fault.at, self._crash, node, fault)
            elif fault.kind == "rank":
                loop.at(fault.at, self._rank_lost, node, fault)
            elif fault.kind == "rail":
                loop.at(fault.at, slowness.__setitem__, node.name, fault.factor)
                loop.at(fault.at + fault.seconds, slowness.__setitem__, node.name, 1.0)
            else:
                loop.at(fault.at, self._slow, node, fault.factor)
                loop.at(fault.at + fault.seconds, self._slow, node, 1.0)

    # --- slow nodes

    def _slow(self, node: Node, factor: float) -> None:
        self._slowed[node.index] = factor
        self._set_slowness(node)

    def _set_slowness(self, node: Node) -> None:
        ranks, away = self._config.expert_ranks, self._away[node.index]
        factor = self._slowed[node.index] * (ranks / (ranks - away) if away else 1.0)
        self.slowness[node.index] = factor
        self._loop.after(self._config.detect_s, self._slow_known, node, factor)

    def _slow_known(self, node: Node, factor: float) -> None:
        """The node's records now report the factor, like those of a real node whose steps take longer than its model
        predicts."""
        node.known_slowness = factor
        self._changed(node)

    # --- ranks with experts

    def _rank_lost(self, node: Node, fault: Fault) -> None:
        if node.down:
            return  # it is back with all its ranks
        if self._away[node.index] + 1 < self._config.expert_copies:
            self._away[node.index] += 1
            self._set_slowness(node)
            self._loop.at(fault.at + fault.seconds, self._rank_back, node, self._crashes[node.index])
        else:
            self._crash(node, fault)

    def _rank_back(self, node: Node, crashes: int) -> None:
        """`crashes`: of the node when the rank was lost. Since a later one the node has all its ranks."""
        if crashes == self._crashes[node.index]:
            self._away[node.index] -= 1
            self._set_slowness(node)

    # --- crashes

    def _crash(self, node: Node, fault: Fault) -> None:
        now, detect_s = self._loop.now, self._config.detect_s
        told = self._parts.placing.told
        if isinstance(told, Gossip) and node.down:
            return  # the others do not know of its last crash yet
        node.crash()
        self._crashes[node.index] += 1
        if self._away[node.index]:
            self._away[node.index] = 0
            self._set_slowness(node)
        if isinstance(told, Gossip):
            self._watch(node, now, fault.at + fault.seconds, told.crashed(node.index))
            self._loop.at(fault.at + fault.seconds, told.returned, node.index)
        else:
            self._loop.after(detect_s, self._noticed, node, now)
            self._loop.at(fault.at + max(fault.seconds, detect_s), self._back, node)
        if fault.kind == "crash":
            node.arena.clear()
            self._parts.pool.lost(node.index)

    def _watch(self, node: Node, crashed: float, until: float, known: Callable[[], bool]) -> None:
        """Wait until the other nodes know; the node is back at `until` at the earliest."""
        if not known():
            self._loop.after(WATCH_S, self._watch, node, crashed, until, known)
            return
        self._noticed(node, crashed)
        self._loop.at(until, self._back, node)

    def _noticed(self, node: Node, crashed: float) -> None:
        take_out(self._parts, node)
        self._changed(node)
        for job in self._jobs:
            if job.sent <= crashed and not job.refused and math.isnan(job.finished) and self._is_lost(job, node):
                self._again(job, crashed)

    def _is_lost(self, job: Job, node: Node) -> bool:
        decode = self._parts.nodes[job.decode]
        return decode is node or (job.prefill == node.name and job not in decode.batch)

    def _again(self, job: Job, crashed: float) -> None:
        for name in (job.prefill, job.decode):
            self._parts.nodes[name].cancel(job)
        self.lost += 1
        job.restart(crashed)
        self._place(job)

    def _back(self, node: Node) -> None:
        take_in(self._parts, node)
        self._changed(node)


def take_out(parts: Parts, node: Node) -> None:
    """The others know that the node is gone, or leaves: they place nothing on it, and its keys get other homes."""
    live = parts.placing.live
    parts.pool.left(node.index)
    # New columns: views gossiped before share the old ones.
    live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
    live.prefills[node.index] = live.decodes[node.index] = False
    live.closed_decode[node.index] = np.inf
    parts.placing.intents.drop(node.name)


def take_in(parts: Parts, node: Node) -> None:
    """The node is there, and the others know it."""
    live = parts.placing.live
    parts.pool.back(node.index)
    live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
    live.prefills[node.index] = "prefill" in node.roles
    live.decodes[node.index] = "decode" in node.roles
    live.closed_decode[node.index] = 0.0 if "decode" in node.roles else np.inf
    node.down = False
