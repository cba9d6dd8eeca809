"""Decode beyond memory: by the resident share and the tier's bandwidth."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated, Goal
from lab.ablations.common.evidence import Values, relative, times, told
from lab.ablations.common.goals import at_least, at_most
from lab.ablations.common.metrics import metric
from lab.ablations.decoding.case import ContextCase

RESIDENT = (1.0, 0.5, 0.25, 0.1, 0.05)
GBYTE_S = (0.5, 3.0, 25.0, 64.0)
"""SSDs, and DRAM behind PCIe."""
LEAST, FORECAST = 0.7, 15.0
"""Goals of this project: the share of what reading allows, and percent by which the forecast may be off."""

RATE, LIMIT, OFF = "tokens/s", "of the limit", "forecast off, %"
FITS, CLASSES, COST = "of an arena that holds it", "classes that may", "cost per million tokens"


def context(resident: float, gbyte_s: float) -> str:
    return f"{resident:.0%} resident, {gbyte_s:g} GB/s"


def cases(requests: int | None) -> list[ContextCase]:
    """There is one request."""
    return [ContextCase(context(resident, rate), resident, rate) for rate in GBYTE_S for resident in RESIDENT]


def worst(values: Values, name: str, most: bool) -> Estimated:
    """The greatest or least mean of the contexts that are partly read."""
    found = [values[context(resident, rate)][name] for rate in GBYTE_S for resident in RESIDENT if resident < 1]
    return (max if most else min)(found, key=lambda one: one.mean)


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    whole = [
        f"{rate:g} GB/s {relative(values, RATE, context(RESIDENT[2], rate), context(1.0, rate))}" for rate in GBYTE_S
    ]
    faster = [
        f"{share:.0%} {told(times(values, RATE, context(share, GBYTE_S[-1]), context(share, GBYTE_S[0])), '.3g', 'x')}"
        for share in RESIDENT[1:]
    ]
    return (
        f"Tokens/s with {RESIDENT[2]:.0%} resident against all: {', '.join(whole)}. With {GBYTE_S[-1]:g} instead of "
        f"{GBYTE_S[0]:g} GB/s, by the resident share, tokens/s are: {', '.join(faster)}."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    least, most = worst(values, LIMIT, most=False), worst(values, OFF, most=True)
    return [
        at_least("beyond memory: share of the limit, least", f">= {LEAST:g}", least, LEAST),
        at_most("beyond memory: the forecast's error, most", f"<= {FORECAST:g} %", most, FORECAST, ".1f", " %"),
    ]


BEYOND = Ablation(
    "beyond-memory",
    "How fast is decode if part of the KV is read again for every token?",
    "One context on a node of LLaMA3-70B: about its newest 8,000 tokens stay in the arena, and the others are read "
    "through the window of sched/beyond.py; of the limit = the longer of reading alone and of the model's own step, "
    "over the step. Cost: 1 per node and hour.",
    cases,
    {
        RATE: metric("tokens_s"),
        LIMIT: metric("of_limit"),
        FITS: metric("of_fitting"),
        OFF: metric("forecast_off", scale=100),
        CLASSES: metric("classes"),
        COST: metric("cost"),
        "node-hours": metric("node_hours"),
    },
    reading,
    paper_source="no figure of one context: FlexGen's own figures are in the ablation flexgen",
    goals=goals,
    x_name="resident share",
)
