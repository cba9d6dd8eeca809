"""Runs a few steps before the first request, so that the node's estimates fit its machine from the start.

Without measurements, a node announces the prior of its cost models and gets too little or too much load until it has
learned from requests. Prefill is measured at growing lengths with and without context, decode at growing batches: this
suffices for the three coefficients of each model (sched/cost.py). Cheap shapes come first, and the time is bounded.
Measured steps of requests then change the models further (engine/core/worker.py); an idle node compares and measures
again (engine/calibration/recalibration.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from engine.core.costs import StepCosts
from engine.step.inputs import Row
from engine.step.runner import Runner
from sched.idle_checks import wrong

Shape = tuple[int, int, bool]
"""(new tokens or number of requests, context of each, whether it is a prefill)."""

SHAPES: Sequence[Shape] = (
    (16, 0, True),
    (1, 64, False),
    (64, 0, True),
    (4, 64, False),
    (32, 256, True),
    (1, 1024, False),
    (256, 0, True),
    (16, 128, False),
    (64, 960, True),
    (8, 512, False),
    (512, 0, True),
    (32, 128, False),
    (1024, 0, True),
    (64, 64, False),
    (256, 1792, True),
)
"""Those of the calibration, the cheap ones of both kinds first."""

SAMPLED = SHAPES[:4]
"""Those that an idle node compares with their estimates."""

SAMPLES = 2
"""Steps of each of them; the fastest counts, because what disturbs a step only makes it slower."""

ACCURATE = 0.15
"""Mean relative error of the estimates of all shapes that ends the calibration."""

MAX_ROUNDS = 4
"""Times that a shape is measured at most: more would keep the models from following the first requests."""

LEAST_SHAPES = 2
"""Number of shapes of each kind that are measured even if the time is over: with one, the coefficients are in the ratio
of the prior, which is that of another machine; with none, they are the prior."""

MAX_DELAY = 3
"""Once calibration has taken this many times the given time in addition, one shape of each kind is enough."""

Clock = Callable[[], float]
Stop = Callable[[], bool]
"""Whether the node has other work: then no further step begins."""


def never() -> bool:
    """A Stop: the node has no other work."""
    return False


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of a step on this node."""

    blocks: Sequence[int]  # unused KV blocks, to write to
    block_size: int
    max_tokens: int  # in a step
    max_requests: int
    max_context: int
    longest_s: float = inf  # of one step, by its estimate; LEAST_SHAPES may take longer

    def fitting(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Those that the node can compute."""
        return [shape for shape in shapes if self.rows(shape)]

    def rows(self, shape: Shape) -> list[Row]:
        """The rows of one step; none if they exceed the limits."""
        count, context, prefill = shape
        requests, tokens = (1, count) if prefill else (count, 1)
        each = -(-(context + tokens) // self.block_size)
        if requests > self.max_requests or requests * tokens > self.max_tokens or context + tokens > self.max_context:
            return []
        if requests * each > len(self.blocks):
            return []
        return [Row([1] * tokens, context, list(self.blocks[i * each : (i + 1) * each])) for i in range(requests)]


def expected_s(costs: StepCosts, shape: Shape) -> float:
    """The estimated seconds of a step."""
    count, context, prefill = shape
    return costs.prefill.estimate(count, context) if prefill else costs.decode.estimate(count, count * (context + 1))


def calibrate(
    runner: Runner,
    costs: StepCosts,
    room: Room,
    seconds: float,
    clock: Clock = time.monotonic,
    stop: Stop = never,
) -> int:
    """Run steps and feed them to `costs`: every shape once, then again until their estimates are ACCURATE, for about
    `seconds` (0 = no steps). A slow node measures one or LEAST_SHAPES of each kind even if that takes longer. Returns
    the number of measured steps. It writes to the blocks of `room`. The call blocks, so run it in the engine thread."""
    if not seconds:
        return 0
    shapes = room.fitting(SHAPES)
    deadline = clock() + seconds
    seen = {True: 0, False: 0}
    measured = 0
    for number in range(MAX_ROUNDS):
        again = number > 0
        measurable: list[Shape] = []
        misses: list[float] = []
        for shape in shapes:
            count, context, prefill = shape
            expected = expected_s(costs, shape)
            least = LEAST_SHAPES if clock() < deadline + MAX_DELAY * seconds else 1
            due = not again and seen[prefill] < least
            if not due and (clock() + (1 if again else 2) * expected > deadline or expected > room.longest_s):
                continue
            took = _fastest(runner, room.rows(shape), clock, stop, 1, warm=not again)
            if took is None:
                return measured
            misses.append(abs(expected - took) / took)
            if prefill:
                costs.prefill.observe(count, context, took)
            else:
                costs.decode.observe(count, count * (context + 1), took)
            measurable.append(shape)
            seen[prefill] += 1
            measured += 1
        if not misses or (again and sum(misses) <= ACCURATE * len(misses)):
            break
        shapes = measurable
    return measured


def mistaken(pairs: Sequence[tuple[float, float]], shapes: Sequence[Shape]) -> bool:
    """Whether the estimates of prompts or those of decodes are wrong; pairs: (estimated, measured) seconds of each
    shape."""
    each = list(zip(pairs, shapes, strict=True))
    return any(wrong([pair for pair, shape in each if shape[2] is prefill]) for prefill in (True, False))


def sample(runner: Runner, shapes: Sequence[Shape], room: Room, clock: Clock, stop: Stop) -> list[float]:
    """Seconds of a step of each shape; of the first ones alone if it had to stop. The call blocks, so run it in the
    engine thread."""
    found: list[float] = []
    for shape in shapes:
        took = _fastest(runner, room.rows(shape), clock, stop, SAMPLES, warm=True)
        if took is None:
            break
        found.append(took)
    return found


def _fastest(runner: Runner, rows: list[Row], clock: Clock, stop: Stop, steps: int, warm: bool) -> float | None:
    """Seconds of the fastest of these steps; None if it had to stop. The first step of a shape (`warm`) also allocates
    buffers and starts threads, so it does not count."""
    best = inf
    for number in range(-int(warm), steps):
        if stop():
            return None
        began = clock()
        runner.step(rows)
        if number >= 0:
            best = min(best, clock() - began)
    return best
