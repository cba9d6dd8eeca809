"""When a node that can prefill and decode should do only one of the two, or both again. Pure.

Every node runs the same rules on the same gossiped records, so all agree without asking, up to the age of the records:

    load of prefill    seconds of queued work per node that prefills, over the objective WAIT_S
    load of decode     the greater of: requests that will decode soon over the seats of the nodes that decode, and the
                       KV blocks they will hold over those that there are

If one stage's load exceeds the other's by BAND and is itself above BUSY for `hold_s`, one node changes, named by
rendezvous hashing: one that does only the other stage begins to do both, and where there is none, one that does both
gives the other stage up. If no stage is busy any more, nodes go back to what they were started for, one at a time. A
node that gives up a role takes nothing new for it and finishes what it has (drain), so no request is dropped. A stage
never loses its last node; one change per two `hold_s` in the cell, and a node that has changed rests for eight
(reference/scheduling.md section 4, step 9).
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
REST, DWELL = 2, 8
"""In hold_s: between two changes in the cell, of one node."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine node as its record tells."""

    node_id: str
    can: frozenset[str]  # its --role
    does: frozenset[str]  # what it takes new requests for
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
    """Of both stages; queued work counts wherever it is, capacity only where the stage takes new requests."""
    prefills = sum("prefill" in node.does for node in nodes)
    seats = sum(node.max_running for node in nodes if "decode" in node.does)
    blocks = sum(node.blocks_total for node in nodes if "decode" in node.does)
    work_s, running = sum(node.work_s for node in nodes), sum(node.running_soon for node in nodes)
    held = sum(node.blocks_soon for node in nodes)
    decode = max(running / max(1, seats), held / blocks if blocks else 0.0)
    return Loads(work_s / max(1, prefills) / WAIT_S, decode)


def wanted(nodes: Sequence[Seen], resting: Collection[str] = ()) -> tuple[str, frozenset[str]] | None:
    """(node, what it should do) that would bring the stages closer, None when nothing should change. Nodes that are
    `resting` stay as they are."""
    now = loads(nodes)
    able = [node for node in nodes if node.can >= BOTH and node.node_id not in resting]
    for short, other in (("prefill", "decode"), ("decode", "prefill")):
        high, low = getattr(now, short), getattr(now, other)
        if high > BUSY and high > low + BAND:
            helpers = [node.node_id for node in able if short not in node.does]
            if helpers:
                return _named(helpers), BOTH
            givers = [node.node_id for node in able if node.does >= BOTH]
            left = sum(other in node.does for node in nodes)
            return (_named(givers), frozenset({short})) if givers and left > 1 else None
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


class RoleController:
    """One node's share in it: `step` every few seconds."""

    def __init__(self, node_id: str, hold_s: float = HOLD_S) -> None:
        self._node_id, self._hold_s = node_id, hold_s
        self._since: tuple[tuple[str, frozenset[str]], float] | None = None  # what is wanted, and since when
        self._layout: dict[str, frozenset[str]] = {}
        self._moved_at: dict[str, float] = {}  # by node

    def step(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """What this node should do from now on; None: go on as before."""
        layout = {node.node_id: node.does for node in nodes}
        self._moved_at |= {name: now for name, does in layout.items() if self._layout.get(name, does) != does}
        self._layout = layout
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
        return want[1]
