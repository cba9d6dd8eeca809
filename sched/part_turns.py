"""Turns of a node that computes a part of a long prompt, or prompts of class batch, and others as well. Pure.

A step has one end, and a part fills steps of its own. So while other prompts come,

- a step of a part is a *slice* of SLICE_S: a prompt that comes meanwhile waits for that, not for a whole chunk;
- other prompts go first, until the part is *owed* as many seconds as they took while it waited. So a prompt that comes
  now and then waits for one slice, and a queue of them leaves the part half of the time.

A slice costs the part the fixed time of one more step. Without other prompts, chunks stay whole.

Prompts of class batch are in the same steps as others, and the order of the queue decides who goes first. But while
prompts of higher classes come, those of class batch get no more of a step than a slice.
"""

from __future__ import annotations

from math import inf

SLICE_S = 0.05
"""As a step that delays the strictest objective between tokens by half (sched/classes.py)."""

RECENT_S = 3.0
"""Other prompts come if one was here so recently."""

MOST_OWED_S = 1.0
"""A part is owed this much at most: what comes after a long queue does not wait for all of it."""


class PartTurns:
    """The turns of one node. Times are seconds on one clock; a step begins with `begin` and ends with `end`."""

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._others_at = -inf  # when another prompt was last here
        self._higher_at = -inf  # when a prompt of a class above batch was last here
        self._began, self._part_runs, self._part_waits = 0.0, False, False

    @property
    def part_first(self) -> bool:
        """Whether a part goes before other prompts that could run as well."""
        return self._owed_s > 0

    def most_s(self, now: float) -> float:
        """The longest time for the next step of a part."""
        return SLICE_S if now - self._others_at < RECENT_S else inf

    def batch_s(self, now: float) -> float:
        """The longest time for prompts of class batch in the next step."""
        return SLICE_S if now - self._higher_at < RECENT_S else inf

    def seen(self, now: float, higher: bool = False) -> None:
        """Another prompt is here. higher: of a class above batch."""
        self._others_at = now
        if higher:
            self._higher_at = now

    def begin(self, now: float, part_runs: bool, part_waits: bool) -> None:
        """A step begins: with a part, or while one waits that could run."""
        self._began, self._part_runs, self._part_waits = now, part_runs, part_waits

    def end(self, now: float) -> None:
        took = max(0.0, now - self._began)
        if self._part_runs:
            self._owed_s = max(0.0, self._owed_s - took)
        elif self._part_waits:
            self._owed_s = min(MOST_OWED_S, self._owed_s + took)
