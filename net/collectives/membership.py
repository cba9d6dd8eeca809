"""Decides which members go on together after some of them are gone: those that report the same. Pure.

Each rank tells the others whom it considers gone, and how many calls are complete for it. A rank that hears of a loss
adopts it. When all that are left have reported the same losses, every one of them decides the same: the members that
are left form the next epoch. A rank that decided first may already report in that epoch; who hears that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """The view of one rank."""

    epoch: int
    members: list[int]
    gone: list[int]
    calls: int  # complete for this rank


@dataclass(frozen=True, slots=True)
class Decision:
    """The next epoch. `agreed`: the same calls were complete for all members."""

    epoch: int
    members: tuple[int, ...]
    calls: int
    agreed: bool


class Removed(Exception):
    """The others go on without this rank; args[0] is the one that said so."""


@dataclass(slots=True)
class Membership:
    """The view of rank `me` in one epoch."""

    me: int
    epoch: int
    members: tuple[int, ...]
    gone: set[int] = field(default_factory=set)
    _heard: dict[int, Report] = field(default_factory=dict)
    _ahead: Report | None = None

    def lose(self, ranks: Iterable[int]) -> bool:
        """Whether one of them was a member that was there until now."""
        new = set(ranks) & set(self.members) - self.gone - {self.me}
        self.gone |= new
        return bool(new)

    def hear(self, rank: int, report: Report) -> None:
        """Raises Removed. Reports of earlier epochs say nothing new."""
        if report.epoch < self.epoch or rank not in self.members:
            return
        if self.me in report.gone or self.me not in report.members:
            raise Removed(rank)
        if rank in self.gone:
            return
        if report.epoch > self.epoch:
            if self._ahead is None or report.epoch > self._ahead.epoch:
                self._ahead = report
            return
        self._heard[rank] = report
        self.lose(report.gone)

    def report(self, calls: int) -> Report:
        return Report(self.epoch, list(self.members), sorted(self.gone), calls)

    def silent(self) -> list[int]:
        """The members that have not reported these losses yet."""
        gone = sorted(self.gone)
        left = set(self.members) - self.gone - {self.me}
        return sorted(rank for rank in left if rank not in self._heard or self._heard[rank].gone != gone)

    def decide(self, calls: int) -> Decision | None:
        """`calls`: complete for this rank, which completes no others in this epoch."""
        if self._ahead is not None:
            ahead = self._ahead
            return Decision(ahead.epoch, tuple(ahead.members), max(calls, ahead.calls), calls == ahead.calls)
        if not self.gone or self.silent():
            return None
        left = tuple(rank for rank in self.members if rank not in self.gone)
        counts = {calls, *(self._heard[rank].calls for rank in left if rank != self.me)}
        return Decision(self.epoch + 1, left, max(counts), len(counts) == 1)
