"""Role changes in a simulated cluster: sched/role_change.py on what the nodes do now, as engine/role_changes.py runs it
on what gossip tells, which is a tenth of a second older.

With `role_changes` every node can prefill and decode, and begins with what its name says. A node that gives up a role
keeps the requests that it has for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sched.role_change import BOTH, RoleController, Seen
from sim.node import Node

if TYPE_CHECKING:
    from sim.cluster import Cluster

PERIOD_S = 2.0


class Roles:
    """Of one run. `changes`: (when, node, what it does from then on)."""

    def __init__(self, cluster: Cluster) -> None:
        self.changes: list[tuple[float, str, frozenset[str]]] = []
        self._cluster = cluster
        self._does = {node.name: BOTH & set(node.roles) for node in cluster.nodes}
        self._controllers: dict[str, RoleController] = {}

    def schedule(self, begin: float) -> None:
        """From the first request on."""
        config = self._cluster.config
        if config.role_changes:
            self._controllers = {name: RoleController(name, config.role_hold_s) for name in self._does}
            self._cluster.loop.at(begin, self._step)

    def _step(self) -> None:
        cluster = self._cluster
        seen = [self._seen(node) for node in cluster.nodes if not node.down]
        for node in seen:
            does = self._controllers[node.node_id].step(cluster.loop.now, seen)
            if does is not None:
                self._take(cluster.by_name[node.node_id], does)
        if cluster.unfinished:
            cluster.loop.after(PERIOD_S, self._step)

    def _seen(self, node: Node) -> Seen:
        return Seen(
            node_id=node.name,
            can=BOTH,
            does=self._does[node.name],
            work_s=node.known_slowness * node.queued_s,
            running_soon=min(node.model.max_batch, node.batch.promised),
            max_running=node.model.max_batch,
            blocks_soon=node.batch.promised_tokens,
            blocks_total=node.model.kv_tokens,
            home=BOTH & set(node.roles),
        )

    def _take(self, node: Node, does: frozenset[str]) -> None:
        self._does[node.name] = does
        self.changes.append((self._cluster.loop.now, node.name, does))
        live, i = self._cluster.live, node.index
        # New columns: views that were gossiped before share the old ones.
        live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
        live.prefills[i], live.decodes[i] = "prefill" in does, "decode" in does
        live.closed_decode[i] = 0.0 if "decode" in does else np.inf
        self._cluster.changed(node)
