"""Decides whose work is next, when several processes ask one: each gets the same share of the work. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). A piece of work begins, in virtual time, when the one before it
of the same process ends, or now if that is later. The piece that begins first is next; virtual time is its begin. So a
process with small pieces passes one with large ones, and nobody saves up turns while it has no work. When all work is
done, virtual time is the end of the last piece: nobody owes the others anything for what it got while they had no work.
"""

from __future__ import annotations


class FairQueue:
    """Each process has at most one piece of work here."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of the last piece of each, in virtual time
        self._waiting: dict[str, float] = {}  # begin of the piece, in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, who: str, work: float) -> None:
        """A piece of `work` > 0, in any unit, waits."""
        begin = max(self._now, self._ends.get(who, 0.0))
        self._ends[who] = begin + work
        self._waiting[who] = begin

    def next(self) -> str:
        """Whose piece is next; it waits no more. Raises ValueError if none waits."""
        who = min(self._waiting, key=self._waiting.__getitem__)
        self._now = self._waiting.pop(who)
        return who

    def rest(self) -> None:
        """All pieces are done, and none waits."""
        self._now = max([self._now, *self._ends.values()])
        self._ends.clear()

    def forget(self, who: str) -> None:
        """It asks no more."""
        self._waiting.pop(who, None)
        self._ends.pop(who, None)
