"""Who is computing a prefix just now, so that a burst of one new prefix is computed once. Pure.

An acceptor about to have blocks computed claims them at the home of the prompt's first block, a place that all the
acceptors of a cell compute alike. The first claimant gets them; those who come later learn how many of their blocks
are being computed where, and weigh that node as if it held them: its batch finds the blocks as they become complete.
Claims are not given back. They end by their time to live, which outlasts the prefill until the digests tell of its
blocks, or with their node; a wrong one costs a detour, never a result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sched.gossip.digest import key64
from sched.gossip.record import node_key

TOLD_S = 2.0
"""Blocks count as claimed for twice the time that they take, and so long: by then the digests have told of them."""

WORTH_S = 0.02
"""Less prefill than this is done before others could have learnt of it, and not worth a claim."""

EXPIRE_S = 1.0
"""A full table looks for claims that ran out this often."""

Key = int | bytes
"""A block's, of one kind in a table."""

Ring = Sequence[tuple[int, str]]
"""(node key, node id), ascending."""


def ring_of(nodes: Iterable[str]) -> Ring:
    return sorted((node_key(node), node) for node in nodes)


def home_of(key: bytes, ring: Ring) -> str:
    """Who keeps the claims on chains that begin with `key`: its successor among the nodes."""
    return ring[bisect_left(ring, (key64(key), "")) % len(ring)][1]


def claimed_depths(known: int, count: int) -> list[int]:
    """The blocks of a chain, counted from 1, that stand for blocks `known` + 1 .. `count` in a claim. They lie a fifth
    of their depth apart, the same for all chains, so two that part find how much they share to a sixth."""
    depths, depth = [], 1
    while depth < count:
        if depth > known:
            depths.append(depth)
        depth += max(1, depth // 5)
    return [*depths, count] if count > known else []


@dataclass(frozen=True, slots=True)
class Claim:
    """`node_id` computes a key's block, done at about `ready_at`; counts until `expires_at`. Times are of the clock of
    the node that keeps the claim."""

    node_id: str
    ready_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class Coming:
    """A node computes the leading `depth` of what was asked about, and is done in about so long."""

    depth: int
    ready_s: float


class Intents:
    """The claims that one node keeps, at most `capacity` keys.

    A full table grants without noting: the burst is then computed more than once, nothing else is lost.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._claims: dict[Key, Claim] = {}
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        return len(self._claims)

    def claim(
        self, now: float, keys: Sequence[Key], node_id: str, ready_s: float, instead_of: str = ""
    ) -> dict[str, Coming]:
        """Which nodes compute how many of `keys`, which follow each other in a chain, already. When nobody does, they
        are `node_id`'s from now on, which takes `ready_s`. A claimant that had to take another node than it claimed
        for claims again, `instead_of` the first. Raises ValueError for a time that is negative."""
        if not ready_s >= 0:
            raise ValueError(f"a claim cannot be ready in {ready_s} s")
        coming = {}
        for depth, key in enumerate(keys, 1):
            held = self._claims.get(key)
            if held is not None and held.expires_at > now and held.node_id != instead_of:
                coming[held.node_id] = Coming(depth, max(0.0, held.ready_at - now))
        if not coming:
            self._note(now, keys, Claim(node_id, now + ready_s, now + 2 * ready_s + TOLD_S))
        return coming

    def _note(self, now: float, keys: Sequence[Key], claim: Claim) -> None:
        if len(self._claims) + len(keys) > self._capacity and now - self._looked_at >= EXPIRE_S:
            self._looked_at = now
            self._claims = {key: held for key, held in self._claims.items() if held.expires_at > now}
        for key in keys:
            if key in self._claims or len(self._claims) < self._capacity:
                self._claims[key] = claim

    def drop(self, node_id: str) -> None:
        """The node is down: what it promised is free again."""
        self._claims = {key: claim for key, claim in self._claims.items() if claim.node_id != node_id}
