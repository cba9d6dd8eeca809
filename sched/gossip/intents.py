"""Records which node is computing a prefix, so that a burst of requests with the same new prefix computes it once.
Pure.

Before blocks are computed, the acceptor claims them at the home of the prompt's first block, which all acceptors of a
cell compute in the same way. The first claim wins. Later claimants learn which node computes how many of their blocks
and treat it as if it held them, because its batch finds the blocks as they become complete. Claims are not released:
they expire after the digests have reported the computed blocks, or end with their node. A wrong claim costs time, never
a wrong result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sched.gossip.digest import key64
from sched.gossip.record import node_key

DIGEST_LAG_S = 2.0
"""A claim expires after twice the compute time plus this; by then the digests have reported the blocks."""

WORTH_S = 0.02
"""A prefill shorter than this ends before others could learn of it and is not worth a claim."""

EXPIRE_S = 1.0
"""Interval at which a full table looks for expired claims, seconds."""

Key = int | bytes
"""A block's key; all keys of a table have the same type."""

Ring = Sequence[tuple[int, str]]
"""(node key, node id), ascending."""


def ring_of(nodes: Iterable[str]) -> Ring:
    return sorted((node_key(node), node) for node in nodes)


def home_of(key: bytes, ring: Ring) -> str:
    """The node that keeps the claims on chains that begin with `key`: its successor on the ring."""
    return ring[bisect_left(ring, (key64(key), "")) % len(ring)][1]


def claimed_depths(known: int, count: int) -> list[int]:
    """The depths (from 1) of the blocks that represent blocks `known` + 1 .. `count` of a chain in a claim. They are a
    fifth of their depth apart, at the same depths in all chains, so the shared length of two chains is found to a
    sixth."""
    depths, depth = [], 1
    while depth < count:
        if depth > known:
            depths.append(depth)
        depth += max(1, depth // 5)
    return [*depths, count] if count > known else []


@dataclass(frozen=True, slots=True)
class Claim:
    """`node_id` computes a key's block, which will be ready at about `ready_at`. The claim is valid until `expires_at`.
    Times are on the clock of the node that keeps the claim."""

    node_id: str
    ready_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class Coming:
    """A node computes the first `depth` blocks of the question and will be done in about `ready_s`."""

    depth: int
    ready_s: float


class Intents:
    """The claims kept by one node, at most `capacity` keys.

    A full table grants claims without recording them; then a burst may be computed more than once.
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
        """The nodes that already compute some of `keys`, a part of a chain. If there are none, `node_id` claims all of
        them for `ready_s` seconds of work. If the acceptor then chooses another node, it claims again with `instead_of`
        set to the first. Raises ValueError if `ready_s` is negative."""
        if not ready_s >= 0:
            raise ValueError(f"a claim cannot be ready in {ready_s} s")
        coming = {}
        for depth, key in enumerate(keys, 1):
            held = self._claims.get(key)
            if held is not None and held.expires_at > now and held.node_id != instead_of:
                coming[held.node_id] = Coming(depth, max(0.0, held.ready_at - now))
        if not coming:
            self._note(now, keys, Claim(node_id, now + ready_s, now + 2 * ready_s + DIGEST_LAG_S))
        return coming

    def _note(self, now: float, keys: Sequence[Key], claim: Claim) -> None:
        if len(self._claims) + len(keys) > self._capacity and now - self._looked_at >= EXPIRE_S:
            self._looked_at = now
            self._claims = {key: held for key, held in self._claims.items() if held.expires_at > now}
        for key in keys:
            if key in self._claims or len(self._claims) < self._capacity:
                self._claims[key] = claim

    def drop(self, node_id: str) -> None:
        """The node is down: drop its claims."""
        self._claims = {key: claim for key, claim in self._claims.items() if claim.node_id != node_id}
