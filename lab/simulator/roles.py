"""Role changes in a simulated cluster: sched/role_change.py on the present state of the nodes.
engine/scaling/role_changes.py runs it on gossiped state, which is 0.1 s older.

With `role_changes` every node can prefill and decode, and starts with the role in its name. A node that gives up a role
finishes its requests of that role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lab.simulator.config import SimConfig
from lab.simulator.models.loop import Loop
from lab.simulator.node import Node
from sched.placement.view import View
from sched.role_change import BOTH, RoleController, Seen
from sched.role_ratio import role_policies

PERIOD_S = 2.0


class Roles:
    """The role changes of one run. `changes`: (time, node, its new role)."""

    def __init__(
        self,
        config: SimConfig,
        loop: Loop,
        nodes: Mapping[str, Node],
        live: View,
        changed: Callable[[Node], None],
        unfinished: Callable[[], int],
    ) -> None:
        """live: the columns that it changes; changed(node): its other columns may be outdated; unfinished(): number of
        open requests; changes stop at 0. Raises ValueError for an unknown --role-policy."""
        self.changes: list[tuple[float, str, frozenset[str]]] = []
        self._config, self._loop, self._nodes, self._live = config, loop, nodes, live
        self._changed, self._unfinished = changed, unfinished
        self._does = {node.name: BOTH & set(node.roles) for node in nodes.values()}
        if config.role_policy not in role_policies:
            raise ValueError(f"--role-policy must be one of {', '.join(role_policies)}, got {config.role_policy!r}")
        self._make = role_policies[config.role_policy]
        self._controllers: dict[str, RoleController] = {}

    def schedule(self, begin: float) -> None:
        """Start with the first request."""
        if self._config.role_changes:
            self._controllers = {name: self._make(name, self._config.role_hold_s) for name in self._does}
            self._loop.at(begin, self._step)

    def _step(self) -> None:
        seen = [seen_of(node, BOTH, self._does[node.name]) for node in self._nodes.values() if not node.down]
        for node in seen:
            does = self._controllers[node.node_id].step(self._loop.now, seen)
            if does is not None:
                self._take(self._nodes[node.node_id], does)
        if self._unfinished():
            self._loop.after(PERIOD_S, self._step)

    def _take(self, node: Node, does: frozenset[str]) -> None:
        self._does[node.name] = does
        self.changes.append((self._loop.now, node.name, does))
        live, i = self._live, node.index
        # New columns: previously gossiped views share the old ones.
        live.prefills, live.decodes = live.prefills.copy(), live.decodes.copy()
        live.prefills[i], live.decodes[i] = "prefill" in does, "decode" in does
        live.closed_decode[i] = 0.0 if "decode" in does else np.inf
        self._changed(node)


def seen_of(node: Node, can: frozenset[str], does: frozenset[str]) -> Seen:
    """The present state of a node in the form that the rules take; blocks of one token."""
    return Seen(
        node_id=node.name,
        can=can,
        does=does,
        work_s=node.known_slowness * node.queued_s,
        running_soon=min(node.model.max_batch, node.batch.promised),
        max_running=node.model.max_batch,
        blocks_soon=node.batch.promised_tokens,
        blocks_total=node.model.kv_tokens,
        home=BOTH & set(node.roles),
    )
