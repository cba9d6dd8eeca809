"""When requests beyond memory take their turns on a node: one at a time, some layers per step, half of the time.

A step has one end for all its requests, and a step over many cold blocks takes as long as many others. So such a
request passes only as many layers in a step as fit into SLICE_S, and then rests for as long as that step took, while
others run. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.step.request import Request, RequestState
from engine.step.step import ScheduledRow, Step

SLICE_S, LONE_SLICE_S = 0.025, 0.25
"""How long it may delay the others of its step, and those that come while it runs alone: half of the strictest
objective between tokens (sched/classes.py), and a quarter of --max-step-ms."""


class ColdTurns:
    """Hears of every step of a batcher, and of every such request: without one, it is asked nothing."""

    def __init__(self) -> None:
        self.present = 0  # number of such requests
        self._began = self._rests_until = 0.0

    def count(self, request: Request, change: int) -> None:
        """The request comes (1) or ends (-1)."""
        self.present += change * (request.cold is not None)

    @staticmethod
    def next(unknown: Sequence[Request], everyone: Iterable[Request]) -> list[Request]:
        """The first of `unknown` that is beyond memory, if no other one has its room in the tiers or waits for it."""
        busy = [r for r in everyone if r.cold is not None and (r.cold.open or r.state is RequestState.LOADING)]
        return [r for r in unknown if r.cold is not None and (not busy or busy == [r])][:1]

    def begin(self, now: float) -> None:
        """A step is chosen."""
        self._began = now

    def awake(self, now: float, requests: list[Request]) -> list[Request]:
        """Without those that are not in the next step."""
        if not self.present:
            return requests
        rests = now < self._rests_until
        return [request for request in requests if request.cold is None or not (rests or request.cold.waits)]

    def wake(self, now: float) -> bool:
        """Nothing else can run. Returns whether a request rested."""
        rested, self._rests_until = now < self._rests_until, min(now, self._rests_until)
        return rested

    def cut(self, rows: Sequence[ScheduledRow]) -> None:
        """Choose the layers that the rows beyond memory of a step pass."""
        for row in rows:
            if (cold := row.request.cold) is not None:
                row.layers = cold.next_layers(row.num_tokens, SLICE_S if len(rows) > 1 else LONE_SLICE_S)
                row.samples = row.samples and row.ends

    def end(self, now: float, step: Step) -> None:
        """The step has run."""
        if step.has_cold:
            self._rests_until = now + (now - self._began)
