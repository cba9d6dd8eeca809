"""When a node that can prefill and decode, and does one of them, should do the other. Pure.

Every node runs the same rules on the same gossiped records, so all agree without asking, up to the age of the records:

    load of prefill    seconds of queued work per node that prefills, over the objective WAIT_S
    load of decode     the greater of: requests that will decode soon over the seats of the nodes that decode, and the
                       KV blocks they will hold over those that there are

If one stage's load exceeds the other's by BAND and is itself above BUSY for `hold_s`, and the other can spare a node,
one of those that do only the other changes over, named by rendezvous hashing. Nodes that do both stay as they are:
they have nothing to gain (scripts/lab/ablations/roles.py). A node takes nothing new for what it gives up and finishes
what it has, so no request is dropped; only then, or after DRAIN times `hold_s`, it begins with the other stage, since
the two in one step are slow. If no stage is busy any more, nodes go back to what they were started for. A stage never
loses its last node; one change per REST times `hold_s` in the cell, and a node that has changed rests for DWELL times
as long (reference/scheduling.md section 4, step 9).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BOTH = frozenset({"prefill", "decode"})

BAND = 0.15
BUSY = 0.7
CALM = 0.3
WAIT_S = 2.0
HOLD_S = 15.0
REST, DWELL, DRAIN = 2, 8, 4
"""In hold_s: between two changes in the cell, of one node; how long a node finishes what it gives up, at most."""

DRAINED_SEATS, DRAINED_S = 0.1, 0.1
"""A stage is finished on a node but for so many of its seats, or seconds of prefill."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine node as its record tells."""

    node_id: str
    can: frozenset[str]  # its --role
    does: frozenset[str]  # what it takes new requests for; empty while it changes over
    work_s: float
    running_soon: int
    max_running: int
    blocks_soon: int = 0
    blocks_total: int = 0
    home: frozenset[str] = BOTH  # what it was started for


@dataclass(frozen=True, slots=True)
class Loads:
    prefill: float
    decode: float


def loads(nodes: Sequence[Seen]) -> Loads:
    """Of both stages; queued work counts wherever it is, capacity only where the stage takes new requests: infinite
    where nobody does."""
    prefills = sum("prefill" in node.does for node in nodes)
    seats = sum(node.max_running for node in nodes if "decode" in node.does)
    blocks = sum(node.blocks_total for node in nodes if "decode" in node.does)
    work_s, running = sum(node.work_s for node in nodes), sum(node.running_soon for node in nodes)
    held = sum(node.blocks_soon for node in nodes)
    decode = max(running / seats if seats else math.inf, held / blocks if blocks else 0.0)
    return Loads(work_s / prefills / WAIT_S if prefills else math.inf, decode)


def wanted(nodes: Sequence[Seen], resting: Collection[str] = ()) -> tuple[str, frozenset[str]] | None:
    """(node, what it should do) that would bring the stages closer, None when nothing should change. Nodes that are
    `resting` stay as they are."""
    now = loads(nodes)
    able = [node for node in nodes if node.can >= BOTH and node.does and node.node_id not in resting]
    for short, other in (("prefill", "decode"), ("decode", "prefill")):
        high, low = getattr(now, short), getattr(now, other)
        if high > BUSY and high > low + BAND:
            count = sum(other in node.does for node in nodes)
            givers = [node.node_id for node in able if node.does == {other}]
            if not givers or count < 2 or low * count / (count - 1) > max(BUSY, high / 2):
                return None
            return _named(givers), frozenset({short})
    if max(now.prefill, now.decode) < CALM:
        astray = {node.node_id: node.home for node in able if _may_go_home(node, nodes)}
        if astray:
            name = _named(astray)
            return name, astray[name]
    return None


def _may_go_home(node: Seen, nodes: Sequence[Seen]) -> bool:
    """It is away, and no stage would lose its last node."""
    others = [other for other in nodes if other is not node]
    left = node.does - node.home
    return node.does != node.home and all(any(role in other.does for other in others) for role in left)


def _named(nodes: Iterable[str]) -> str:
    return max(nodes, key=lambda name: blake2b(name.encode(), digest_size=8).digest())


def _drained(node: Seen, does: frozenset[str]) -> bool:
    """Whether it has little left of what it will not do any more."""
    if "decode" not in does:
        return node.running_soon <= DRAINED_SEATS * node.max_running
    return node.work_s <= DRAINED_S


class RoleController:
    """One node's share in it: `step` every few seconds."""

    def __init__(self, node_id: str, hold_s: float = HOLD_S) -> None:
        self._node_id, self._hold_s = node_id, hold_s
        self._since: tuple[tuple[str, frozenset[str]], float] | None = None  # what is wanted, and since when
        self._layout: dict[str, frozenset[str]] = {}
        self._moved_at: dict[str, float] = {}  # by node
        self._next: tuple[frozenset[str], float] | None = None  # what this node will do, since when it drains

    def step(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """What this node should take from now on, nothing while it changes over; None: go on as before."""
        layout = {node.node_id: node.does for node in nodes}
        self._moved_at |= {name: now for name, does in layout.items() if self._layout.get(name, does) != does}
        self._layout = layout
        if self._next is not None:
            return self._drain(now, nodes)
        resting = {name for name, moved in self._moved_at.items() if now - moved < DWELL * self._hold_s}
        want = wanted(nodes, resting)
        if want is None:
            self._since = None
            return None
        if self._since is None or self._since[0] != want:
            self._since = want, now
        held = now - self._since[1] >= self._hold_s
        rested = now - max(self._moved_at.values(), default=-math.inf) >= REST * self._hold_s
        if want[0] != self._node_id or not held or not rested:
            return None
        self._since, self._moved_at[self._node_id] = None, now
        if layout[self._node_id] & want[1]:
            return want[1]
        self._next = want[1], now
        return frozenset()

    def _drain(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """The change is complete when what is given up is finished."""
        assert self._next is not None
        (does, since), me = self._next, next((node for node in nodes if node.node_id == self._node_id), None)
        if now - since < DRAIN * self._hold_s and (me is None or not _drained(me, does)):
            return None
        self._next, self._moved_at[self._node_id] = None, now
        return does
