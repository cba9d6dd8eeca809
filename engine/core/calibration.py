"""Runs a few steps before the first request, so that the node's estimates fit its machine from the start.

Without measurements, a node announces the prior of its cost models and gets too little or too much load until it has
learned from requests. Prefill is measured at growing lengths with and without context, decode at growing batches: this
suffices for the three coefficients of each model (sched/cost.py). Cheap shapes come first, and the time is bounded.
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
    """Run steps for about `seconds` and feed them to `costs`. Returns the number of measured steps. It writes to KV
    blocks 0, 1, ..., which must be unused. The call blocks, so run it in the engine thread."""
    pairs = zip_longest(((shape, True) for shape in PREFILLS), ((shape, False) for shape in DECODES))
    shapes = [shape for pair in pairs for shape in pair if shape is not None]
    deadline = clock() + seconds
    measured = 0
    for (count, context), prefill in shapes:
        rows = _rows(count, context, room, prefill)
        if rows is None:
            continue
        expected = costs.prefill.estimate(count, context) if prefill else costs.decode.estimate(count, count * context)
        if clock() + 2 * expected > deadline:
            continue
        runner.step(rows)  # the first step of a shape also allocates buffers and starts threads
        began = clock()
        if began + 1.5 * expected > deadline and measured:
            break
        runner.step(rows)
        took = clock() - began
        if prefill:
            costs.prefill.observe(count, context, took)
        else:
            costs.decode.observe(count, count * (context + 1), took)
        measured += 1
    return measured


def _rows(count: int, context: int, room: Room, prefill: bool) -> list[Row] | None:
    """The rows of one step; None if they exceed the node's limits."""
    requests, tokens = (1, count) if prefill else (count, 1)
    each = -(-(context + tokens) // room.block_size)
    if requests > room.max_requests or requests * tokens > room.max_tokens or context + tokens > room.max_context:
        return None
    if requests * each > room.num_blocks:
        return None
    return [Row([1] * tokens, context, list(range(i * each, (i + 1) * each))) for i in range(requests)]
