"""The order of arriving batches: which one is next, which are missing, which are of another process. Pure.

Batches are numbered from 0. A subscriber may begin late and may lose some. A publisher that was started again begins at
0 again, with an empty cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    OLD = "old"  # it has been applied
    GAP = "gap"  # batches before it are missing: ask for them first
    AGAIN = "again"  # the publisher was started again: forget what it held, then apply


@dataclass(slots=True)
class Arrival:
    """`next`: the number of the batch that follows the applied ones."""

    next: int = 0
    lost: int = 0  # batches that nobody could send again

    def judge(self, number: int, replayed: bool = False) -> Verdict:
        """`replayed`: the batch was asked for, so a smaller number is no sign of a new process."""
        if number == self.next:
            return Verdict.APPLY
        if number > self.next:
            return Verdict.GAP
        return Verdict.OLD if replayed else Verdict.AGAIN

    def applied(self, number: int) -> None:
        self.next = number + 1

    def skip_to(self, number: int) -> None:
        """The batches before `number` are lost."""
        self.lost += number - self.next
        self.next = number
