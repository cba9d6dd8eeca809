"""How far a node that cannot keep all objectives misses them: by the same factor for prompts and for streams. Pure.

A step takes at most s tbt seconds, where tbt is the shortest objective of the requests that decode, and `alone` of
them go to the decodes. So the prompts get the share 1 - alone / (s tbt) of the time, and the stretch s is the smallest
number of at least 1 with, for every prompt,

    waited + work / (1 - alone / (s tbt)) <= s ttft

where work is the prefill of this prompt and of all prompts before it. While s is 1, all objectives are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sched.classes import Classes

MOST = 4.0
"""Longer steps would hardly help the prompts: at this stretch they already get most of the time."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is not computed yet, or not completely."""

    service_class: str
    waited_s: float  # since its arrival
    tokens: int  # left to compute
    context: int  # tokens known


def stretch(
    prompts: Iterable[Waiting],
    alone_s: float,
    tbt_s: float,
    classes: Classes,
    prefill_s: Callable[[int, int], float],
) -> float:
    """From 1 to MOST. `prompts` in the order in which they are computed; `alone_s`: decodes of a step;
    `prefill_s(tokens, context)`: seconds of prefill."""
    found, work = 1.0, 0.0
    for prompt in prompts:
        work += prefill_s(prompt.tokens, prompt.context)
        found = max(found, _needed(prompt.waited_s, work, classes[prompt.service_class].ttft_s, alone_s / tbt_s))
        if found >= MOST:
            return MOST
    return found


def _needed(waited: float, work: float, ttft: float, alone: float) -> float:
    """The smallest s > alone with waited + work s / (s - alone) <= s ttft: the larger root of
    ttft s^2 - (ttft alone + work + waited) s + waited alone."""
    b = ttft * alone + work + waited
    return (b + math.sqrt(max(0.0, b * b - 4 * ttft * waited * alone))) / (2 * ttft)
