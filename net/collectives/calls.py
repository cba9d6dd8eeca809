"""Calls: the collectives of one epoch of a group, on raw memory.

Memory is given as an address with a number of bytes or elements; it stays valid and contiguous during the call. Members
are numbered from 0 in the order of their ranks, and every list has an entry per member. All raise CallsDiffer,
RanksGone, and ValueError for reductions that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Calls(Protocol):
    """net/collectives/shared.py on one host, net/collectives/exchange.py over sockets."""

    def barrier(self) -> None:
        """Returns when all members have called it."""

    def all_reduce(self, given: int, into: int, count: int, dtype: str, op: str) -> None:
        """`count` elements of all members, reduced, on all members. `into` may be `given`."""

    def reduce(self, given: int, into: int, count: int, dtype: str, op: str, root: int) -> None:
        """The same on `root` alone; `into` is not touched elsewhere."""

    def reduce_scatter(self, given: Sequence[int], into: int, count: int, dtype: str, op: str) -> None:
        """`count` elements: the reduction of what all members gave for this one."""

    def all_gather(self, given: int, into: Sequence[int], nbytes: int) -> None:
        """`nbytes` of every member, on all members."""

    def gather(self, given: int, into: Sequence[int], nbytes: int, root: int) -> None:
        """The same on `root` alone; `into` is empty elsewhere."""

    def scatter(self, given: Sequence[int], into: int, nbytes: int, root: int) -> None:
        """`nbytes` for each member, from `root`; `given` is empty elsewhere."""

    def broadcast(self, memory: int, nbytes: int, root: int) -> None:
        """`nbytes` of root, on all members."""

    def all_to_all(
        self, given: Sequence[int], given_bytes: Sequence[int], into: Sequence[int], into_bytes: Sequence[int]
    ) -> None:
        """given_bytes[i] bytes to member i, into_bytes[i] bytes from it."""
