"""Who is computing a prefix just now, so that a burst of one new prefix is computed once. Pure.

The homes of a key keep these claims, a lock with a time to live that everybody computes the place of: an acceptor
about to have blocks computed claims them there first. The first claimant of a key gets it; the others learn who
computes it and send their requests there, where the batch finds the blocks as they become complete. A claim ends when
the blocks are published, when the claimant gives it back or is down, or by its time to live: a lost message can cost
one duplicate computation and never blocks anybody for longer than `ttl_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """`node_id` computes a key's block until `expires_at`, by the clock of whoever keeps the claim."""

    node_id: str
    expires_at: float


class Intents:
    """Claims on keys (64-bit numbers or block keys, one kind per table), at most `capacity` of them.

    A full table grants without noting: the burst is then computed more than once, nothing else is lost.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._claims: dict[int | bytes, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, now: float, keys: Sequence[int | bytes], node_id: str, ttl_s: float) -> list[str]:
        """Claim every key that nobody holds; returns for each key who computes it, `node_id` itself included.

        A node that claims again renews its claims. Raises ValueError for a time to live that is not positive.
        """
        if not ttl_s > 0:
            raise ValueError(f"a claim needs a time to live, got {ttl_s} s")
        if len(self._claims) + len(keys) > self._capacity:
            self.expire(now)
        owners = []
        for key in keys:
            held = self._claims.get(key)
            if held is not None and held.expires_at > now and held.node_id != node_id:
                owners.append(held.node_id)
                continue
            owners.append(node_id)
            if key in self._claims or len(self._claims) < self._capacity:
                self._claims[key] = Claim(node_id, now + ttl_s)
        return owners

    def holder(self, now: float, key: int | bytes) -> str | None:
        """Who computes this key."""
        held = self._claims.get(key)
        return held.node_id if held is not None and held.expires_at > now else None

    def depths(self, now: float, keys: Sequence[int | bytes]) -> dict[str, int]:
        """How far along the chain each node will hold it: the last of `keys` that it claims, counted from 1.

        A node that computes key d has or computes the keys before it, so depths add to those of the digests.
        """
        reached: dict[str, int] = {}
        for depth, key in enumerate(keys, 1):
            node_id = self.holder(now, key)
            if node_id is not None:
                reached[node_id] = depth
        return reached

    def release(self, keys: Iterable[int | bytes], node_id: str) -> None:
        """The blocks are published, or will not be computed after all. Claims of others stay."""
        for key in keys:
            held = self._claims.get(key)
            if held is not None and held.node_id == node_id:
                del self._claims[key]

    def drop(self, node_id: str) -> None:
        """The node is down: what it promised is free again."""
        self._claims = {key: claim for key, claim in self._claims.items() if claim.node_id != node_id}

    def expire(self, now: float) -> None:
        """Forget claims that ran out; call now and then."""
        self._claims = {key: claim for key, claim in self._claims.items() if claim.expires_at > now}
