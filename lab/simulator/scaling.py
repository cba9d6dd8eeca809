"""Nodes that start and leave with the load: sched/scaling/ on the present state of the nodes.
engine/scaling/scaler.py runs it on gossiped state, which is 0.1 s older.

With `autoscale`, a role has as many nodes as its largest number; those above the number at the beginning are off. A
node that starts is paid from the decision on and ready after `scale_start_s`. A node that leaves takes no new requests,
finishes those it has, and then is off. Its cache is lost, and so is its share of the pool, which a real node hands
over. Its requests do not move to other nodes, as they would by default.
"""

from __future__ import annotations

from collections.abc import Callable

from lab.simulator.config import SimConfig
from lab.simulator.failures import Parts, take_in, take_out
from lab.simulator.making import counts, price
from lab.simulator.models.loop import Loop
from lab.simulator.node import Node
from lab.simulator.roles import seen_of
from sched.classes import with_objectives
from sched.role_change import BOTH
from sched.scaling.autoscaler import PREFIX, Autoscaler
from sched.scaling.bounds import parse
from sched.scaling.crew import Drain, Rules, Start
from sched.scaling.need import NodeLoad

PERIOD_S = 2.0

PAID = "starting", "ready", "draining"


class Scaling:
    """The nodes of one run that are on. `changes`: (time, start or drain, node)."""

    def __init__(
        self,
        config: SimConfig,
        loop: Loop,
        parts: Parts,
        changed: Callable[[Node], None],
        unfinished: Callable[[], int],
    ) -> None:
        """changed(node): its columns may be outdated; unfinished(): number of open requests; scaling stops at 0."""
        self.changes: list[tuple[float, str, str]] = []
        self._config, self._loop, self._parts = config, loop, parts
        self._changed, self._unfinished = changed, unfinished
        self._state = dict.fromkeys(parts.nodes, "ready")
        self._paid: dict[str, list[tuple[float, float]]] = {name: [] for name in parts.nodes}
        self._paid_since = dict.fromkeys(parts.nodes, float("-inf"))
        self._core: Autoscaler | None = None

    def schedule(self, begin: float) -> None:
        """Start with the first request."""
        config = self._config
        if not config.autoscale:
            return
        bounds, objective = parse(config.autoscale), with_objectives(config.slo)["standard"]
        self._core = Autoscaler(
            Rules(bounds, objective, config.scale_out_s, config.scale_in_s, 2 * config.scale_start_s)
        )
        on = counts(config, at_begin=True)
        for node in self._parts.nodes.values():
            if int(node.name.rpartition("-")[2]) >= on[_kind(node)]:
                self._take_out(node, "off")
        self._parts.placing.told_all()
        self._loop.at(begin, self._step)

    def paid_s(self, node: str, begin: float, end: float) -> float:
        """Seconds between `begin` and `end` in which the node was on or starting."""
        spans = list(self._paid[node])
        if self._state[node] in PAID:
            spans.append((self._paid_since[node], end))
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)

    # --- the decision

    def _step(self) -> None:
        assert self._core is not None
        loads = [self._load(node) for node in self._parts.nodes.values() if self._state[node.name] in PAID]
        for effect in self._core.step(self._loop.now, loads, acts=True):
            name = effect.node.removeprefix(PREFIX)
            if isinstance(effect, Start):
                self.changes.append((self._loop.now, "start", name))
                self._state[name], self._paid_since[name] = "starting", self._loop.now
                self._loop.after(self._config.scale_start_s, self._ready, self._parts.nodes[name])
            elif isinstance(effect, Drain):
                self.changes.append((self._loop.now, "drain", name))
                self._take_out(self._parts.nodes[name], "draining")
        for name, state in self._state.items():
            if state == "draining" and self._is_empty(self._parts.nodes[name]):
                self._off(self._parts.nodes[name])
        if self._unfinished():
            self._loop.after(PERIOD_S, self._step)

    def _load(self, node: Node) -> NodeLoad:
        does = BOTH & set(node.roles)
        running, state = len(node.batch.running), self._state[node.name]
        seen = seen_of(node, does, does)
        return NodeLoad(
            node_id=f"{PREFIX}{node.name}",
            can=does,
            does=does,
            work_s=seen.work_s,
            running_soon=seen.running_soon,
            max_running=seen.max_running,
            blocks_soon=seen.blocks_soon,
            blocks_total=seen.blocks_total,
            home=does,
            role=_kind(node),
            ready=state != "starting",
            draining=state == "draining",
            running=running,
            waiting=node.batch.promised - running,
            step_s=node.step_s() if "decode" in does else 0.0,
            cost=price(self._config, node),
        )

    # --- what follows

    def _ready(self, node: Node) -> None:
        self._state[node.name] = "ready"
        take_in(self._parts, node)
        self._changed(node)

    def _take_out(self, node: Node, state: str) -> None:
        """It gets no more requests."""
        self._state[node.name] = state
        self._parts.pool.lost(node.index)
        take_out(self._parts, node)
        self._changed(node)
        if state == "off":
            node.down = True

    def _is_empty(self, node: Node) -> bool:
        return not (node.waiting or node.batch.promised or node.computing)

    def _off(self, node: Node) -> None:
        self._state[node.name] = "off"
        self._paid[node.name].append((self._paid_since[node.name], self._loop.now))
        node.arena.clear()
        node.down = True


def _kind(node: Node) -> str:
    """The node's role in --autoscale."""
    return node.name.rpartition("-")[0]
