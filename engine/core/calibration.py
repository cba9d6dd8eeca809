"""Runs a few steps before the first request, so that the node's estimates fit its machine from the start.

Without measurements, a node announces the prior of its cost models and gets too little or too much load until it has
learned from requests. Prefill is measured at growing lengths with and without context, decode at growing batches: this
suffices for the three coefficients of each model (sched/cost.py). Cheap shapes come first, and the time is bounded.
Measured steps of requests then change the models further (engine/core/worker.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from engine.core.costs import StepCosts
from engine.step.inputs import Row
from engine.step.runner import Runner

PREFILLS = ((16, 0), (64, 0), (32, 256), (256, 0), (64, 960), (512, 0), (1024, 0), (256, 1792))
"""(new tokens, context)."""

DECODES = ((1, 64), (4, 64), (1, 1024), (16, 128), (8, 512), (32, 128), (64, 64))
"""(requests, context of each)."""

ACCURATE = 0.15
"""Mean relative error of the estimates of all shapes that ends the calibration."""

MAX_ROUNDS = 4
"""Times that a shape is measured at most: more would keep the models from following the first requests."""

LEAST_SHAPES = 2
"""Number of shapes of each kind that are measured even if the time is over: with one, the coefficients are in the ratio
of the prior, which is that of another machine; with none, they are the prior."""

MAX_DELAY = 3
"""Once calibration has taken this many times the given time in addition, one shape of each kind is enough."""


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of a step on this node."""

    num_blocks: int  # unused KV blocks
    block_size: int
    max_tokens: int  # in a step
    max_requests: int
    max_context: int


def calibrate(
    runner: Runner, costs: StepCosts, room: Room, seconds: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run steps and feed them to `costs`: every shape once, then again until their estimates are ACCURATE, for about
    `seconds` (0 = no steps). A slow node measures one or LEAST_SHAPES of each kind even if that takes longer. Returns
    the number of measured steps. It writes to KV blocks 0, 1, ..., which must be unused. The call blocks, so run it in
    the engine thread."""
    if not seconds:
        return 0
    pairs = zip_longest(((shape, True) for shape in PREFILLS), ((shape, False) for shape in DECODES))
    known = [shape for pair in pairs for shape in pair if shape is not None]
    shapes = [((n, context), prefill) for (n, context), prefill in known if _rows(n, context, room, prefill)]
    deadline = clock() + seconds
    seen = {True: 0, False: 0}
    measured = 0
    for number in range(MAX_ROUNDS):
        again = number > 0
        fitting: list[tuple[tuple[int, int], bool]] = []
        misses: list[float] = []
        for (count, context), prefill in shapes:
            expected = _expected(costs, count, context, prefill)
            least = LEAST_SHAPES if clock() < deadline + MAX_DELAY * seconds else 1
            due = not again and seen[prefill] < least
            if not due and clock() + (1 if again else 2) * expected > deadline:
                continue
            took = _measure(runner, _rows(count, context, room, prefill), clock, warm=not again)
            misses.append(abs(expected - took) / took)
            if prefill:
                costs.prefill.observe(count, context, took)
            else:
                costs.decode.observe(count, count * (context + 1), took)
            fitting.append(((count, context), prefill))
            seen[prefill] += 1
            measured += 1
        if not misses or (again and sum(misses) <= ACCURATE * len(misses)):
            break
        shapes = fitting
    return measured


def _expected(costs: StepCosts, count: int, context: int, prefill: bool) -> float:
    if prefill:
        return costs.prefill.estimate(count, context)
    return costs.decode.estimate(count, count * (context + 1))


def _measure(runner: Runner, rows: list[Row], clock: Callable[[], float], warm: bool) -> float:
    """Seconds of a step. The first one of a shape (`warm`) also allocates buffers and starts threads, so it does not
    count."""
    if warm:
        runner.step(rows)
    began = clock()
    runner.step(rows)
    return clock() - began


def _rows(count: int, context: int, room: Room, prefill: bool) -> list[Row]:
    """The rows of one step; none if they exceed the node's limits."""
    requests, tokens = (1, count) if prefill else (count, 1)
    each = -(-(context + tokens) // room.block_size)
    if requests > room.max_requests or requests * tokens > room.max_tokens or context + tokens > room.max_context:
        return []
    if requests * each > room.num_blocks:
        return []
    return [Row([1] * tokens, context, list(range(i * each, (i + 1) * each))) for i in range(requests)]
