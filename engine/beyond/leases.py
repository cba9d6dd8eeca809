"""Leases: which nodes have lent room for blocks here, and until when. Pure.

A lease ends when its owner gives it back, when the owner is lost, or when nothing has been heard of it for LEASE_S:
every ask renews it. An end frees the room at once, or when the last computation over its blocks is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEASE_S = 30.0
"""Until a lease ends of which nothing is heard."""


class NoLease(KeyError):
    """There is no such lease of this node, or it has ended."""


class LeasesFull(Exception):
    """All room that may be lent is lent."""


@dataclass(eq=False, slots=True)
class Lease:
    """Room for `blocks` blocks."""

    owner: str
    number: int  # chosen by its owner
    blocks: int
    until: float  # monotonic seconds
    using: int = 0  # computations over its blocks that are under way
    ended: bool = False


class Leases:
    """Of at most `most` blocks. What the methods return is free now: the caller gives the room back."""

    def __init__(self, most: int, lease_s: float = LEASE_S) -> None:
        self.most, self._lease_s = most, lease_s
        self._leases: dict[tuple[str, int], Lease] = {}
        self.lent = 0  # blocks, also of leases that have ended and are in use
        self.expired = 0  # leases that ended because nothing was heard of them

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def left(self) -> int:
        """Blocks that may still be lent."""
        return self.most - self.lent

    def grant(self, owner: str, number: int, blocks: int, now: float) -> Lease:
        """Raises LeasesFull; ValueError for a number that this owner uses already."""
        if (owner, number) in self._leases:
            raise ValueError(f"{owner} has lease {number} already")
        if blocks > self.left:
            raise LeasesFull(
                f"{blocks} blocks are asked for; of the {self.most} that may be lent, {self.lent} are lent to others"
            )
        lease = self._leases[owner, number] = Lease(owner, number, blocks, now + self._lease_s)
        self.lent += blocks
        return lease

    def use(self, owner: str, number: int, now: float) -> Lease:
        """A computation over its blocks begins; `done` ends it. Raises NoLease."""
        lease = self._leases.get((owner, number))
        if lease is None:
            raise NoLease(f"{owner} has no lease {number} here: it has ended")
        lease.using += 1
        lease.until = max(lease.until, now + self._lease_s)
        return lease

    def done(self, lease: Lease) -> list[Lease]:
        """The computation has ended."""
        lease.using -= 1
        return self._freed([lease]) if lease.ended else []

    def keep(self, owner: str, numbers: Iterable[int], now: float) -> None:
        """These are needed further on."""
        for number in numbers:
            lease = self._leases.get((owner, number))
            if lease is not None:
                lease.until = max(lease.until, now + self._lease_s)

    def release(self, owner: str, numbers: Iterable[int]) -> list[Lease]:
        """Their owner needs them no longer; unknown ones are ignored."""
        return self._end([lease for n in numbers if (lease := self._leases.get((owner, n))) is not None])

    def lost(self, owner: str) -> list[Lease]:
        """A node was lost."""
        return self._end([lease for lease in self._leases.values() if lease.owner == owner])

    def expire(self, now: float) -> list[Lease]:
        """Time has passed. A lease in use is alive."""
        late = [lease for lease in self._leases.values() if lease.until <= now and not lease.using]
        self.expired += len(late)
        return self._end(late)

    def next_end(self) -> float | None:
        """When `expire` is worth a call; None without leases."""
        return min((lease.until for lease in self._leases.values()), default=None)

    def _end(self, leases: Iterable[Lease]) -> list[Lease]:
        ended = list(leases)
        for lease in ended:
            lease.ended = True
            del self._leases[lease.owner, lease.number]
        return self._freed(ended)

    def _freed(self, leases: Iterable[Lease]) -> list[Lease]:
        free = [lease for lease in leases if not lease.using]
        self.lent -= sum(lease.blocks for lease in free)
        return free
