"""Errors of collective calls."""

from __future__ import annotations

from collections.abc import Iterable


class RanksGone(RuntimeError):
    """Ranks of the group ended, were too late, or left; `ranks` names them."""

    def __init__(self, reason: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.ranks = tuple(sorted(ranks))


class RootGone(RanksGone):
    """The rank that a call begins or ends with is no member."""


class CallsDiffer(RuntimeError):
    """The ranks do not call the same collective with the same sizes. Through shared
    memory the group stays usable; over sockets it does not."""
