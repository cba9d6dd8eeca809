"""When a node that can prefill and decode should do only one of the two, or both again. Pure.

Every node runs the same rules on the same gossiped records, so all agree without asking, up to the age of the records:

    load of prefill    seconds of queued work per node that prefills, over the objective WAIT_S
    load of decode     requests that will decode soon over the seats of the nodes that decode

If one stage's load exceeds the other's by BAND and is itself above BUSY for HOLD_S, one node gives up its part in the
other stage: of those that do both, the one that rendezvous hashing names. If no stage is busy any more, specialised
nodes do both again, one at a time. A node that gives up a role takes nothing new for it and finishes what it has
(drain), so no request is dropped. A stage never loses its last node; one change per REST_S in the cell, and a node that
has changed rests for DWELL_S (reference/scheduling.md section 4, step 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BOTH = frozenset({"prefill", "decode"})

BAND = 0.15
BUSY = 0.7
CALM = 0.3
WAIT_S = 2.0
HOLD_S = 15.0
REST_S = 30.0
DWELL_S = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One engine node as its record tells."""

    node_id: str
    can: frozenset[str]  # its --role
    does: frozenset[str]  # what it takes new requests for
    work_s: float
    running_soon: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Loads:
    prefill: float
    decode: float


def loads(nodes: Sequence[Seen]) -> Loads:
    """Of both stages; queued work counts wherever it is, capacity only where the stage takes new requests."""
    prefills = sum("prefill" in node.does for node in nodes)
    seats = sum(node.max_running for node in nodes if "decode" in node.does)
    work_s, running = sum(node.work_s for node in nodes), sum(node.running_soon for node in nodes)
    return Loads(work_s / max(1, prefills) / WAIT_S, running / max(1, seats))


def wanted(nodes: Sequence[Seen]) -> tuple[str, frozenset[str]] | None:
    """(node, what it should do) that would bring the stages closer, None when nothing should change."""
    now = loads(nodes)
    for short, other in (("prefill", "decode"), ("decode", "prefill")):
        high, low = getattr(now, short), getattr(now, other)
        if high > BUSY and high > low + BAND:
            helpers = [node for node in nodes if node.can >= BOTH and short not in node.does]
            if helpers:
                return _named(helpers), BOTH
            givers = [node for node in nodes if node.can >= BOTH and node.does >= BOTH]
            left = sum(other in node.does for node in nodes)
            return (_named(givers), frozenset({short})) if givers and left > 1 else None
    if max(now.prefill, now.decode) < CALM:
        narrow = [node for node in nodes if node.can >= BOTH and not node.does >= BOTH]
        if narrow:
            return _named(narrow), BOTH
    return None


def _named(nodes: Sequence[Seen]) -> str:
    return max((node.node_id for node in nodes), key=lambda name: blake2b(name.encode(), digest_size=8).digest())


class RoleController:
    """One node's share in it: `step` every few seconds."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._since: tuple[tuple[str, frozenset[str]], float] | None = None  # what is wanted, and since when
        self._layout: dict[str, frozenset[str]] = {}
        self._changed_at = float("-inf")  # anywhere in the cell
        self._own_change = float("-inf")

    def step(self, now: float, nodes: Sequence[Seen]) -> frozenset[str] | None:
        """What this node should do from now on; None: go on as before."""
        layout = {node.node_id: node.does for node in nodes}
        moved = [name for name, does in layout.items() if self._layout.get(name, does) != does]
        if moved:
            self._changed_at = now
        self._layout = layout
        want = wanted(nodes)
        if want is None:
            self._since = None
            return None
        if self._since is None or self._since[0] != want:
            self._since = want, now
        rested = now - self._changed_at >= REST_S and now - self._own_change >= DWELL_S
        if want[0] != self._node_id or now - self._since[1] < HOLD_S or not rested:
            return None
        self._since, self._own_change = None, now
        return want[1]
