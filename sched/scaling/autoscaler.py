"""Decides which nodes start and which leave, so that each role has as many as its load needs. Pure.

Every node runs the same rules on the same gossiped records. One of them acts: the node that rendezvous hashing chooses
among those that can call the command (`acting`). If it is lost, the next one has seen the same load and goes on, so no
protocol elects anybody. Views may differ for a moment, and then two nodes act. Both ask for the same new node, because
it gets the first free name of its role, and the command starts a name only once. A node leaves only if the one that
asks is the one that acts in its own view (engine/scaling/scaler.py), so not both get nodes to leave.

    start   need > ready + coming for out_s: all missing nodes
    drain   need with MARGIN more load < ready for in_s, in_s after the last change: all nodes that can be spared
    stop    a drained node has left, or a started node was not ready in time

A node that starts counts as capacity only when it is ready, and a draining node no more; but until it has left, it is
one of the `most` that may run. Only nodes that a start named are drained, so nodes that people started stay. The role
keeps at least `least` nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sched.classes import ServiceClass
from sched.role_change import named
from sched.scaling.bounds import Bounds
from sched.scaling.need import IDLE_S, Need, NodeLoad, Smoothed

PREFIX = "scaled-"
"""Names of nodes that a start made: scaled-ROLE-NUMBER."""

MARGIN = 0.25
"""A node leaves only if the others could bear this much more than the present load."""

IN_WINDOWS = 4
"""The load is averaged over in_s / IN_WINDOWS, and also over out_s."""

LONGEST_PAUSE_S = 600.0
"""Longest pause after starts that failed; each failure doubles it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A node of this role and name should join."""

    role: str
    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """This node should leave without dropping a request."""

    role: str
    node: str


@dataclass(frozen=True, slots=True)
class Stop:
    """This node has left, or was never ready: what it ran on is free."""

    role: str
    node: str


Effect = Start | Drain | Stop


@dataclass(frozen=True, slots=True)
class Rules:
    """What a role should have, and how fast. `out_s`, `in_s`: how long more or fewer nodes must be needed; `start_s`:
    longest time from a start to a ready node."""

    bounds: tuple[Bounds, ...]
    objective: ServiceClass
    out_s: float
    in_s: float
    start_s: float


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
            own = [node for node in nodes if node.role == role.bounds.role]
            effects += role.step(now, own, taken, acts)
        return effects

    def failed(self, now: float, effect: Start | Stop) -> None:
        """The command could not start or stop the node: try again later."""
        for role in self._roles:
            if role.bounds.role == effect.role:
                role.failed(now, effect)

    def state(self) -> dict[str, dict[str, int]]:
        """By role: nodes that the load needs, ready ones, starting ones, draining ones."""
        return {role.bounds.role: dict(role.counts) for role in self._roles}


class _Role:
    """The nodes of one role."""

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self.bounds = bounds
        self.counts = {"needed": bounds.least, "ready": 0, "starting": 0, "draining": 0}
        self._rules = rules
        self._soon, self._long = Need(rules.out_s), Need(max(rules.out_s, rules.in_s / IN_WINDOWS))
        self._pending: dict[str, float] = {}  # nodes that were started or load their model, and since when
        self._given_up: set[str] = set()  # nodes that were not ready in time
        self._ready: frozenset[str] | None = None
        self._draining: set[str] = set()
        self._asked: set[str] = set()  # to drain; a node may have left before it was seen to
        self._unstopped: dict[str, float] = {}  # nodes that the command could not stop, and when to try again
        self._short_since = self._spare_since = math.nan
        self._changed_at = self._retry_at = -math.inf
        self._failures = 0
        self._busy: dict[str, Smoothed] = {}  # ready nodes: their requests, as long as in `_long`

    def step(self, now: float, nodes: Sequence[NodeLoad], taken: set[str], acts: bool) -> list[Effect]:
        ready = [node for node in nodes if node.takes]
        effects = self._watch(now, nodes, ready, acts)
        self._soon.observe(now, nodes)
        self._long.observe(now, nodes)
        self._measure(now, ready)
        coming = self._pending.keys()
        need, spare = self._needed(ready)
        self.counts = {
            "needed": need,
            "ready": len(ready),
            "starting": len(coming),
            "draining": len(self._draining),
        }
        short = min(need, self.bounds.most - len(self._draining)) - len(ready) - len(coming)
        self._short_since = _since(self._short_since, now, short > 0)
        self._spare_since = _since(self._spare_since, now, spare < len(ready) and not coming and not self._draining)
        if not acts:
            return []
        if now - self._short_since >= self._rules.out_s and now >= self._retry_at:
            self._short_since = math.nan
            for name in self._free_names(short, taken | coming):
                self._pending[name] = now
                effects.append(Start(self.bounds.role, name))
            self.counts["starting"] = len(coming)
            return effects
        in_s = self._rules.in_s
        rested = now - self._spare_since >= in_s and now - self._changed_at >= in_s
        if rested and (leavers := self._leavers(ready, len(ready) - spare)):
            self._spare_since, self._changed_at = math.nan, now
            self._asked.update(leavers)
            effects += [Drain(self.bounds.role, name) for name in leavers]
        return effects

    def failed(self, now: float, effect: Start | Stop) -> None:
        if isinstance(effect, Stop):
            self._unstopped[effect.node] = now + self._rules.out_s
            return
        self._pending.pop(effect.node, None)
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._failures += 1
        self._retry_at = now + min(LONGEST_PAUSE_S, self._rules.out_s * 2.0 ** min(self._failures, 20))

    def _watch(self, now: float, nodes: Sequence[NodeLoad], ready: Sequence[NodeLoad], acts: bool) -> list[Effect]:
        """Note which nodes have come and gone since the last step."""
        names = frozenset(node.node_id for node in ready)
        if names != self._ready:
            self._ready, self._changed_at = names, now
        here = {node.node_id for node in nodes}
        loading = {node.node_id for node in nodes if not node.ready and not node.draining}
        self._given_up &= loading
        for name in loading - self._given_up:
            self._pending.setdefault(name, now)
        gone = (self._draining | self._asked) - here
        for name, again_at in list(self._unstopped.items()):
            if name in here or now >= again_at:  # it runs again under this name, or: once more
                del self._unstopped[name]
                gone |= {name} - here
        self._asked &= here
        for name, since in list(self._pending.items()):
            if name in names:
                self._failures = 0
                del self._pending[name]
            elif now - since > self._rules.start_s:
                del self._pending[name]
                self._given_up.add(name)
                if name.startswith(PREFIX):  # others load for as long as they like
                    self._pause(now)
                gone.add(name)
        self._draining = {node.node_id for node in nodes if node.draining}
        stops = [Stop(self.bounds.role, name) for name in sorted(gone) if name.startswith(PREFIX)]
        return list(stops) if acts else []

    def _measure(self, now: float, ready: Sequence[NodeLoad]) -> None:
        window_s = self._rules.in_s / IN_WINDOWS
        self._busy = {node.node_id: self._busy.get(node.node_id, Smoothed(window_s)) for node in ready}
        for node in ready:
            self._busy[node.node_id].add(now, node.running + node.waiting + (node.work_s > IDLE_S))

    def _needed(self, ready: Sequence[NodeLoad]) -> tuple[int, int]:
        """(nodes for the load, nodes for MARGIN more). The load is that of a longer time, and also the present one if
        it is more than these nodes can do: a short window alone would follow every fluctuation."""
        bounds, objective = self.bounds, self._rules.objective
        if not ready:
            return bounds.least, bounds.least
        soon = self._soon.nodes(objective) if self._soon.presses(objective) else 1
        need = max(soon, self._long.nodes(objective))
        return bounds.clamp(need), bounds.clamp(max(need, self._long.nodes(objective, 1 + MARGIN)))

    def _free_names(self, count: int, taken: set[str]) -> list[str]:
        numbers = (f"{PREFIX}{self.bounds.role}-{i}" for i in range(len(taken) + count))
        return [name for name in numbers if name not in taken][:count]

    def _leavers(self, ready: Sequence[NodeLoad], count: int) -> list[str]:
        """`count` nodes, or as many as a start named: those with the least work, of equal ones the dearest. Placement
        leaves the nodes idle that it needs least: slow ones, or with a placement by cost dear ones."""
        own = [node for node in ready if node.node_id.startswith(PREFIX)]
        own.sort(key=lambda node: (round(self._busy[node.node_id].mean, 1), -node.cost, node.node_id))
        return [node.node_id for node in own[: min(count, len(ready) - 1)]]


def _since(since: float, now: float, holds: bool) -> float:
    """Since when a condition holds; NaN if it does not."""
    if not holds:
        return math.nan
    return now if math.isnan(since) else since
