"""Turns of a node that computes a part of a long prompt, or prompts of class batch, and others as well. Pure.

A step has one end, and a part fills steps of its own. So

- a step of a part ends at the next border when another prompt comes: behind a layer, or behind its attention. The
  prompt does not wait for a chunk; the chunk keeps its tokens, and goes on there later (engine/step/apart.py);
- other prompts go first, until the part is *owed* as many seconds as they took while it waited. So a prompt that comes
  now and then waits for the next border, and a queue of them leaves the part half of the time.

Without other prompts, a part loses nothing.

The order of the queue decides whether prompts of class batch go before others. While requests of higher classes come,

- those of class batch get no more of a step than SLICE_S;
- a step that computes nothing else *gives way*: it ends behind the layer that it is in, and is computed again later;
- one that computes a prompt before them leaves them out;
- one that decodes for others leaves out the decodes of class batch behind them in the order.

So nobody waits for it, as long as class batch loses no more than LOST_SHARE of its time by the last three. Where more
requests come, it gets what they leave of each step, and its own steps run to their end.
"""

from __future__ import annotations

from math import inf

SLICE_S = 0.05
"""As a step that delays the strictest objective between tokens by half (sched/classes.py)."""

RECENT_S = 3.0
"""Prompts of a class above batch come if one was here in these last seconds."""

LOST_SHARE = 0.2
"""Of the time of steps of class batch alone: so much may be lost in steps that give way, or leave it out."""

MOST_LOST_S = 0.2
"""This much may be lost after a time in which nothing was, in seconds. The step in which it ends counts whole."""

GIVES_WAY_S = 60.0
"""Steps with prompts give way if one of a higher class was here in these last seconds: one that may do so, and whose
KV leaves, or whose model does not run in one call, is computed layer by layer."""

MOST_OWED_S = 1.0
"""A part is owed this much at most: what comes after a long queue does not wait for all of it."""


class PartTurns:
    """The turns of one node. Times are seconds on one clock; a step begins with `begin` and ends with `end`."""

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._higher_at = -inf  # when a prompt of a class above batch was last here
        self._began, self._part_runs, self._part_waits = 0.0, False, False
        self._batch_runs, self._batch_left_out = False, False
        self._may_lose_s = MOST_LOST_S

    @property
    def part_first(self) -> bool:
        """Whether a part goes before other prompts that could run as well."""
        return self._owed_s > 0

    @property
    def batch_may_lose(self) -> bool:
        """Whether a step may leave class batch out."""
        return self._may_lose_s > 0

    def batch_gives_way(self, now: float) -> bool:
        """Whether a step that computes only class batch, and prompts of it, may give way."""
        return self.batch_may_lose and now - self._higher_at < GIVES_WAY_S

    def lets_in_at(self, higher: bool, was_here: bool) -> float:
        """When the part of the running step has to let a prompt in. higher: of a higher class than the part. was_here:
        when the step began, so if it goes first, it could not run then. Nothing tells when blocks become free for it,
        so another look follows after SLICE_S."""
        at = self._began if higher else self._began + self._owed_s
        return self._began + SLICE_S if was_here and at == self._began else at

    def batch_s(self, now: float) -> float:
        """The longest time for prompts of class batch in the next step."""
        return SLICE_S if now - self._higher_at < RECENT_S else inf

    def seen_higher(self, now: float) -> None:
        """A prompt of a class above batch is here."""
        self._higher_at = now

    def begin(
        self, now: float, part_runs: bool, part_waits: bool, batch_runs: bool = False, batch_left_out: bool = False
    ) -> None:
        """A step begins: with a part, or while one waits that could run; or one that computes only class batch, or that
        leaves it out."""
        self._began, self._part_runs, self._part_waits = now, part_runs, part_waits
        self._batch_runs, self._batch_left_out = batch_runs, batch_left_out

    def end(self, now: float, gave_way: bool = False) -> None:
        took = max(0.0, now - self._began)
        if gave_way or self._batch_left_out:
            self._may_lose_s -= took
        elif self._batch_runs:
            self._may_lose_s = min(MOST_LOST_S, self._may_lose_s + LOST_SHARE * took)
        if self._part_runs:
            self._owed_s = max(0.0, self._owed_s - took)
        elif self._part_waits:
            self._owed_s = min(MOST_OWED_S, self._owed_s + took)
