"""Decides which running request moves to which decode node. Pure.

A node decides for itself alone, by the gossiped records of the others, as Llumnix does (Sun et al., OSDI 2024):

    load of a node    the greater of two ratios: KV blocks in use over all its blocks, and its running and waiting
                      requests over its seats
    pairs             nodes sorted by load; the most loaded one gives to the least loaded one, the second to the last
                      but one, and so on, so no node gets requests from two sides

A pair begins to balance when the loads differ by more than START_GAP, and goes on until they differ by less than
STOP_GAP (hysteresis). A request whose move would turn the difference around stays.

Two other reasons need no difference: the node leaves (drain), or its blocks run out, and the batch would have to take
the blocks of a request and compute them again later (pressure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

START_GAP, STOP_GAP = 0.2, 0.1
LEAST_LEFT = 16
"""A request with fewer tokens left ends about as soon as it has moved."""

SPARE_BLOCKS = 4
"""Blocks that stay free on the destination after a move."""


@dataclass(frozen=True, slots=True)
class DecodeNode:
    """A decode node that takes requests, from its record."""

    node_id: str
    blocks_used: int
    blocks_total: int
    requests: int  # running and waiting
    seats: int

    @property
    def load(self) -> float:
        return max(self.blocks_used / max(1, self.blocks_total), self.requests / max(1, self.seats))

    @property
    def room(self) -> int:
        """Blocks that a move may take; none without a free seat."""
        return max(0, self.blocks_total - self.blocks_used - SPARE_BLOCKS) if self.requests < self.seats else 0

    def share(self, blocks: int) -> float:
        """How much one more request with this many blocks adds to the load, at most."""
        return max(blocks / max(1, self.blocks_total), 1 / max(1, self.seats))


@dataclass(frozen=True, slots=True)
class Movable:
    """A running request."""

    request_id: str
    blocks: int
    left: int  # tokens that it may still make


class Balancer:
    """The balance of one node against the others; it remembers whether its pair is balancing."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._active = False

    def partner(self, nodes: Sequence[DecodeNode]) -> DecodeNode | None:
        """The node that should get a request of this node now; None if the loads are equal enough."""
        ordered = sorted(nodes, key=lambda node: (-node.load, node.node_id))
        place = next((i for i, node in enumerate(ordered) if node.node_id == self._node_id), len(ordered))
        if place >= len(ordered) // 2:
            self._active = False
            return None
        me, partner = ordered[place], ordered[-1 - place]
        self._active = me.load - partner.load > (STOP_GAP if self._active else START_GAP)
        return partner if self._active else None


def to_balance(requests: Sequence[Movable], me: DecodeNode, partner: DecodeNode) -> Movable | None:
    """The request whose move costs least for what it brings: the most tokens left per block to copy. None if every
    move would make `partner` the more loaded one, or none is worth it."""
    gap = me.load - partner.load
    fit = [
        one
        for one in requests
        if one.left >= LEAST_LEFT
        and one.blocks <= partner.room
        and me.share(one.blocks) + partner.share(one.blocks) <= gap
    ]
    return max(fit, key=_worth, default=None)


def in_need(requests: Sequence[Movable], free: int, nodes: Sequence[DecodeNode]) -> tuple[Movable, DecodeNode] | None:
    """Under pressure: when the `free` blocks do not suffice for one more block of each of the `requests`. The node with
    the most room gets the request that is cheapest to move. None without need or without room."""
    if free >= len(requests) or len(requests) < 2:
        return None
    node = max(nodes, key=lambda one: (one.room, one.node_id), default=None)
    if node is None:
        return None
    fit = [one for one in requests if one.left >= LEAST_LEFT and one.blocks <= node.room]
    chosen = max(fit, key=_worth, default=None)
    return None if chosen is None else (chosen, node)


def to_leave(requests: Sequence[Movable], nodes: Sequence[DecodeNode]) -> tuple[Movable, DecodeNode] | None:
    """For a node that leaves: the request with the most tokens left, and the least loaded node with room for it."""
    for one in sorted(requests, key=lambda one: (-one.left, one.request_id)):
        able = [node for node in nodes if one.blocks <= node.room]
        if able:
            return one, min(able, key=lambda node: (node.load, node.node_id))
    return None


def _worth(one: Movable) -> tuple[float, str]:
    return one.left / max(1, one.blocks), one.request_id
