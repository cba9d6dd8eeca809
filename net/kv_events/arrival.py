"""The order of arriving batches: which one is next, which are missing, which are of another process. Pure.

Batches are numbered from 0. A subscriber may begin late and may lose some. A publisher that was started again begins at
0 again, with an empty cache. A batch that was asked for may also arrive by itself, later: the same bytes under the same
number are no sign of a new process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    _asked: dict[int, int] = field(default_factory=dict)  # number -> hash of those applied that may arrive once more

    def judge(self, number: int, payload: bytes, replayed: bool = False) -> Verdict:
        """`replayed`: the batch was asked for, so a smaller number is no sign of a new process."""
        if number == self.next:
            return Verdict.APPLY
        if number > self.next:
            return Verdict.GAP
        return Verdict.OLD if replayed or self._asked.get(number) == hash(payload) else Verdict.AGAIN

    def applied(self, number: int, payload: bytes, replayed: bool = False) -> None:
        """What arrives by itself does so in order: after such a batch no earlier one follows."""
        self.next = number + 1
        if replayed:
            self._asked[number] = hash(payload)
        else:
            self._asked.clear()

    def skip_to(self, number: int) -> None:
        """The batches before `number` are lost."""
        self.lost += number - self.next
        self.next = number
