"""Decides which nodes start and which leave, so that each role has as many as its load needs. Pure.

Every node runs the same rules on the same gossiped records. One of them acts: the node that rendezvous hashing chooses
among those that can call the command (`acting`). If it is lost, the next one has seen the same load and goes on, so no
protocol elects anybody. Views may differ for a moment, and then two nodes act. Both ask for the same new node, because
it gets the first free name of its role, and the command starts a name only once. A node leaves only if the one that
asks is the one that acts in its own view (engine/scaling/scaler.py), so not both get nodes to leave.

How long a role waits before it changes, and what it may do, says sched/scaling/crew.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sched.role_change import named
from sched.scaling.bounds import Bounds
from sched.scaling.crew import Crew, Effect, Present, Rules, Start, Stop
from sched.scaling.need import IDLE_S, IN_WINDOWS, Demand, NodeLoad, Smoothed

PREFIX = "scaled-"
"""Names of nodes that a start made: scaled-ROLE-NUMBER."""


def acting(candidates: Iterable[str]) -> str | None:
    """The node that acts, of those that can call the command."""
    names = list(candidates)
    return named(names) if names else None


class Autoscaler:
    """One node's view of all roles. Call `step` at even intervals, several times per `out_s`."""

    def __init__(self, rules: Rules) -> None:
        self._roles = [_Role(bounds, rules) for bounds in rules.bounds]

    def step(self, now: float, nodes: Sequence[NodeLoad], acts: bool) -> list[Effect]:
        """`nodes`: all members that are not known to be dead. Without `acts` the node only looks."""
        taken = {node.node_id for node in nodes}
        effects: list[Effect] = []
        for role in self._roles:
            own = [node for node in nodes if node.role == role.crew.bounds.role]
            effects += role.step(now, own, taken, acts)
        return effects

    def failed(self, now: float, effect: Start | Stop) -> None:
        """The command could not start or stop the node: try again later."""
        for role in self._roles:
            if role.crew.bounds.role == effect.role:
                role.crew.failed(now, effect)

    def state(self) -> dict[str, dict[str, int]]:
        """By role: nodes that the load needs, ready ones, starting ones, draining ones."""
        return {role.crew.bounds.role: dict(role.crew.counts) for role in self._roles}


class _Role:
    """The nodes of one role."""

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self.crew = Crew(bounds, rules, f"{PREFIX}{bounds.role}-")
        self._rules = rules
        self._demand = Demand(rules.out_s, rules.in_s)
        self._busy: dict[str, Smoothed] = {}  # ready nodes: their requests, averaged as the load is

    def step(self, now: float, nodes: Sequence[NodeLoad], taken: set[str], acts: bool) -> list[Effect]:
        ready = [node for node in nodes if node.takes]
        self._demand.observe(now, nodes)
        self._measure(now, ready)
        need = self._demand.nodes(self._rules.objective) if ready else (0, 0)
        members = [Present(node.node_id, node.ready, node.draining) for node in nodes]
        return self.crew.step(now, members, need, self._leavers(ready), taken, acts)

    def _measure(self, now: float, ready: Sequence[NodeLoad]) -> None:
        window_s = self._rules.in_s / IN_WINDOWS
        self._busy = {node.node_id: self._busy.get(node.node_id, Smoothed(window_s)) for node in ready}
        for node in ready:
            self._busy[node.node_id].add(now, node.running + node.waiting + (node.work_s > IDLE_S))

    def _leavers(self, ready: Sequence[NodeLoad]) -> list[str]:
        """Those with the least work first, of equal ones the dearest. Placement leaves the nodes idle that it needs
        least: slow ones, or with a placement by cost dear ones."""
        busy = {name: round(mean.mean, 1) for name, mean in self._busy.items()}
        return [node.node_id for node in sorted(ready, key=lambda node: (busy[node.node_id], -node.cost, node.node_id))]
