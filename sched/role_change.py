"""Decides when a node that can prefill and decode, and does one of them, switches to the other. Pure.

Every node runs the same rules on the same gossiped records, so all nodes agree without asking, up to the age of the
records:

    load of prefill    seconds of queued work per node that prefills, over the objective WAIT_S
    load of decode     the greater of two ratios: requests that will decode soon over the seats of the decode nodes,
                       and the KV blocks that they will hold over all KV blocks of these nodes

One node switches when, for `hold_s`, the load of one stage is above BUSY_LOAD and exceeds that of the other stage by
MIN_LOAD_DIFFERENCE, and the other stage can spare a node. Rendezvous hashing chooses it among the nodes that do only
the other stage. Nodes that do both do not switch, because they would gain nothing (lab/ablations/simulated/roles.py).

A node that switches takes no new requests for its old stage and finishes the current ones, so no request is dropped.
Only then, or after DRAIN_HOLDS times `hold_s`, it begins with the new stage, because steps with both stages are slow.
When no stage is busy any more, nodes return to the role that they started with. A stage never loses its last node. A
cell makes one change per CELL_PAUSE_HOLDS times `hold_s`, and a node waits NODE_PAUSE_HOLDS times `hold_s` between two
changes of its own (reference/scheduling.md section 4, step 9).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BOTH = frozenset({"prefill", "decode"})

MIN_LOAD_DIFFERENCE = 0.15
BUSY_LOAD = 0.7
CALM_LOAD = 0.3
WAIT_S = 2.0
HOLD_S = 15.0
CELL_PAUSE_HOLDS, NODE_PAUSE_HOLDS, DRAIN_HOLDS = 2, 8, 4
"""In units of hold_s: least time between two changes in a cell, and between two changes of one node; longest time in
which a node finishes the requests of its old stage."""

DRAINED_SEATS, DRAINED_S = 0.1, 0.1
"""A node has finished a stage when at most this share of its seats, or this many seconds of prefill, are left."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine node, from its record."""

    node_id: str
    can: frozenset[str]  # stages of its --role
    does: frozenset[str]  # stages for which it takes new requests; empty while it switches
    work_s: float
    running_soon: int
    max_running: int
    blocks_soon: int = 0
    blocks_total: int = 0
    home: frozenset[str] = BOTH  # stages that it started with


@dataclass(frozen=True, slots=True)
class Loads:
    prefill: float
    decode: float


def loads(nodes: Sequence[Seen]) -> Loads:
    """The loads of both stages. Queued work counts on every node, capacity only on nodes that take new requests for the
    stage; without such nodes the load is infinite."""
    prefills = sum("prefill" in node.does for node in nodes)
    seats = sum(node.max_running for node in nodes if "decode" in node.does)
    blocks = sum(node.blocks_total for node in nodes if "decode" in node.does)
    work_s, running = sum(node.work_s for node in nodes), sum(node.running_soon for node in nodes)
    held = sum(node.blocks_soon for node in nodes)
    decode = max(running / seats if seats else math.inf, held / blocks if blocks else 0.0)
    return Loads(work_s / prefills / WAIT_S if prefills else math.inf, decode)


def wanted(nodes: Sequence[Seen], resting: Collection[str] = ()) -> tuple[str, frozenset[str]] | None:
    """(node, its new stages) for a change that would balance the stages; None if no change is needed. Nodes in
    `resting` do not change."""
    now = loads(nodes)
    able = [node for node in nodes if node.can >= BOTH and node.does and node.node_id not in resting]
    for short, other in (("prefill", "decode"), ("decode", "prefill")):
        high, low = getattr(now, short), getattr(now, other)
        if high > BUSY_LOAD and high > low + MIN_LOAD_DIFFERENCE:
            count = sum(other in node.does for node in nodes)
            givers = [node.node_id for node in able if node.does == {other}]
            if not givers or count < 2 or low * count / (count - 1) > max(BUSY_LOAD, high / 2):
                return None
            return named(givers), frozenset({short})
    if max(now.prefill, now.decode) < CALM_LOAD:
        astray = {node.node_id: node.home for node in able if _may_go_home(node, nodes)}
        if astray:
            name = named(astray)
            return name, astray[name]
    return None


def _may_go_home(node: Seen, nodes: Sequence[Seen]) -> bool:
    """Whether the node has switched and can return without taking the last node from a stage."""
    others = [other for other in nodes if other is not node]
    left = node.does - node.home
    return node.does != node.home and all(any(role in other.does for other in others) for role in left)


def named(nodes: Iterable[str]) -> str:
    """The node that all nodes name without asking: the one with the greatest hash."""
    return max(nodes, key=lambda name: blake2b(name.encode(), digest_size=8).digest())


def _drained(node: Seen, does: frozenset[str]) -> bool:
    """Whether the node has nearly finished the requests of the stages that it gives up."""
    if "decode" not in does:
        return node.running_soon <= DRAINED_SEATS * node.max_running
    return node.work_s <= DRAINED_S


class RoleController:
    """One node's part of the decision. Call `step` every few seconds."""

    def __init__(self, node_id: str, hold_s: float = HOLD_S) -> None:
        self._node_id, self._hold_s = node_id, hold_s
        self._since: tuple[tuple[str, frozenset[str]], float] | None = None  # (wanted change, since when)
        self._layout: dict[str, frozenset[str]] = {}
        self._moved_at: dict[str, float] = {}  # by node
        self._next: tuple[frozenset[str], float] | None = None  # (this node's next stages, since when it drains)

    def step(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """The stages for which this node should take requests from now on, empty while it switches; None: no change."""
        layout = {node.node_id: node.does for node in nodes}
        self._moved_at |= {name: now for name, does in layout.items() if self._layout.get(name, does) != does}
        self._layout = layout
        if self._next is not None:
            return self._drain(now, nodes)
        resting = {name for name, moved in self._moved_at.items() if now - moved < NODE_PAUSE_HOLDS * self._hold_s}
        want = self._wanted(nodes, resting)
        if want is None:
            self._since = None
            return None
        if self._since is None or self._since[0] != want:
            self._since = want, now
        held = now - self._since[1] >= self._hold_s
        rested = now - max(self._moved_at.values(), default=-math.inf) >= CELL_PAUSE_HOLDS * self._hold_s
        if want[0] != self._node_id or not held or not rested:
            return None
        self._since, self._moved_at[self._node_id] = None, now
        if layout[self._node_id] & want[1]:
            return want[1]
        self._next = want[1], now
        return frozenset()

    def _wanted(self, nodes: Sequence[Seen], resting: Collection[str]) -> tuple[str, frozenset[str]] | None:
        """The rule: which node should change, and to what."""
        return wanted(nodes, resting)

    def _drain(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """Complete the change when the old stages have drained."""
        assert self._next is not None
        (does, since), me = self._next, next((node for node in nodes if node.node_id == self._node_id), None)
        if now - since < DRAIN_HOLDS * self._hold_s and (me is None or not _drained(me, does)):
            return None
        self._next, self._moved_at[self._node_id] = None, now
        return does
