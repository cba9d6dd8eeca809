"""Measures steps again while the node is idle, and corrects its cost models if they are wrong (sched/idle_checks.py).

A check compares a few small steps with their estimates. Only if these are wrong, all shapes are measured again, and the
models change if these say the same. What a node gossips of its speed follows from the models. A check uses blocks that
nobody holds, and ends with its running step as soon as a request comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cache.pool.block_pool import BlockPool
from engine.calibration.calibration import SAMPLED, SHAPES, Clock, Room, calibrate, expected_s, mistaken, sample
from engine.core.costs import StepCosts
from engine.core.worker import Worker
from net.loop.tasks import awaited, keep
from sched.idle_checks import IdleChecks, Verdict, factor

log = logging.getLogger("mooncake.engine")

LONGEST_STEP_S = 0.2
"""Of a step of a check: a request that comes meanwhile waits for its end."""

BLOCKS = 256
"""Blocks of the arena that a check uses at most."""

EVICTED_PART = 64
"""A check takes cached blocks only if less than a 64th of the arena is free."""

POLL_S = 0.25
"""How often an idle node looks whether requests came and went."""


class Recalibration:
    """The checks of one node, from `start` until closed."""

    def __init__(
        self,
        worker: Worker,
        room: Room,
        seconds: float,
        freed: Callable[[], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """room: without blocks. seconds: how long a calibration takes. freed: called when blocks are free again."""
        self._worker, self._room, self._seconds = worker, replace(room, longest_s=LONGEST_STEP_S), seconds
        self._pool: BlockPool = worker.batcher.pool
        self._costs: StepCosts = worker.costs
        self._freed, self._clock = freed, clock
        self._rule = IdleChecks(clock())
        self._corrected: Callable[[StepCosts], None] = lambda costs: None
        self._checks = dict.fromkeys(Verdict, 0)
        self._spent_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.lent: list[int] = []  # blocks that the running check writes to

    def on_corrected(self, corrected: Callable[[StepCosts], None]) -> None:
        """Call `corrected(costs)` with the measurements that correct the models; they stay as they are."""
        self._corrected = corrected

    def start(self) -> None:
        self._rule = IdleChecks(self._clock())
        self._task = keep(self._run, "idle checks")

    async def close(self) -> None:
        """Waits for the end of a running step."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """For /debug/state. `wait_s`: until the next check may begin; 0 while one runs."""
        told: dict[str, Any] = {verdict.value: count for verdict, count in self._checks.items()}
        return told | {"spent_s": self._spent_s, "wait_s": self._rule.wait_s(self._clock())}

    def busy(self) -> bool:
        """Whether the node has other work. Any thread may call it."""
        batcher = self._worker.batcher
        return bool(batcher.requests or batcher.seats.claims or self._worker.lost or self._closing)

    async def _run(self) -> None:
        while True:
            now = self._clock()
            if self.busy():
                self._rule.busy(now)
            if (wait_s := self._rule.wait_s(now)) > 0:
                await asyncio.sleep(min(wait_s, POLL_S))
                continue
            verdict = Verdict.CUT
            try:
                verdict = await self.check()
            finally:
                self._rule.ended(now, self._clock(), verdict)
                self._spent_s += self._clock() - now

    async def check(self) -> Verdict:
        """Compare, and correct the models if they are wrong."""
        usage = self._pool.usage()
        count = min(BLOCKS, max(usage["free"], usage["total"] // EVICTED_PART), self._pool.num_free)
        self.lent = sorted(self._pool.allocate(count))
        work = awaited(self._compare(replace(self._room, blocks=self.lent)))
        try:
            verdict = await asyncio.shield(work)
        except asyncio.CancelledError:
            await work  # its steps write to the blocks
            raise
        finally:
            lent, self.lent = self.lent, []
            self._pool.release(lent)
            self._freed()
        self._checks[verdict] += 1
        return verdict

    async def _compare(self, room: Room) -> Verdict:
        runner, in_thread = self._worker.runner, self._worker.in_thread
        shapes = room.fitting(SAMPLED)
        expected = [expected_s(self._costs, shape) for shape in shapes]  # here: the event loop fits the models
        measured = await in_thread(partial(sample, runner, shapes, room, self._clock, self.busy))
        if len(measured) < len(shapes) or not shapes:
            return Verdict.CUT
        if not mistaken(list(zip(expected, measured, strict=True)), shapes):
            return Verdict.RIGHT
        fresh = StepCosts()
        await in_thread(partial(calibrate, runner, fresh, room, self._seconds, self._clock, self.busy))
        if self.busy():
            return Verdict.CUT
        shapes = [shape for shape in room.fitting(SHAPES) if expected_s(fresh, shape) <= LONGEST_STEP_S] or shapes
        pairs = [(expected_s(self._costs, shape), expected_s(fresh, shape)) for shape in shapes]
        if not mistaken(pairs, shapes):
            return Verdict.RIGHT
        await asyncio.to_thread(self._corrected, fresh)
        self._costs.replace(fresh)
        log.info("steps take %.2f times as long as this node had measured: its estimates are corrected", factor(pairs))
        return Verdict.WRONG
