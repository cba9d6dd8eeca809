"""Orders of the prefill queue. With one class: the mean against the longest wait. With several: batch work fills the
capacity that interactive requests leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import best_of, leaders, relative, times, told
from lab.ablations.common.goals import at_most
from lab.ablations.common.metrics import metric
from lab.loads.changes import Filled
from lab.simulator.config import SimConfig

ORDERS_KNOWN = ("fcfs", "edf", "srpt", "weighted-fair")
ALONE = "interactive alone"
BATCH_PER_S = 3.4
P99 = "interactive p99 TTFT, s"


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 8000, 8000), speed=1.4)
    return [
        Case(order, SimConfig(queue_order=order, prefill=6, decode=6, pool_blocks=6000), work) for order in ORDERS_KNOWN
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    mean, tail = (relative(values, name, "srpt", "fcfs") for name in ("mean slowdown", "p99 TTFT, s"))
    best = best_of(values, "mean slowdown", {order: order for order in ORDERS_KNOWN}, most=False)
    return (
        f"Aged SRPT against FCFS: mean slowdown {mean}, p99 TTFT {tail}; by mean slowdown {best}. The load was set so "
        "that prompts queue: at the trace's own speed on 8P+8D there is little to reorder."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    mean, most = (times(values, name, "srpt", "fcfs") for name in ("mean slowdown", "largest slowdown"))
    return [
        at_most("srpt with ageing: mean slowdown over fcfs", "<= 0.6x", mean, 0.6, ".2f", "x"),
        at_most("srpt with ageing: largest slowdown over fcfs", "<= 2x", most, 2.0, ".2f", "x"),
    ]


ORDERS = Ablation(
    "orders",
    "Which prompt should be computed next?",
    "6P+6D, conversation trace 1.4 times as fast, one class: EDF and weighted-fair are FCFS then. Slowdown = TTFT over "
    "the time of the whole prompt on an idle node without any cache, so hits bring it below 1.",
    cases,
    {
        "mean slowdown": metric("slowdown", "mean"),
        "largest slowdown": metric("slowdown", "max"),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "p99 TTFT, s": metric("ttft_s", "p99"),
        "longest TTFT, s": metric("ttft_s", "max"),
    },
    reading,
    goals=goals,
)


def mixed_cases(requests: int | None) -> list[Case]:
    most = min(requests or 3000, 3000)
    base = {"pool_blocks": 6000}
    alone = Workload("conversation", most, change=Filled(0.0))
    both = Workload("conversation", most, change=Filled(BATCH_PER_S))
    made = [Case(ALONE, SimConfig(**base), alone)]  # type: ignore[arg-type]
    for order in ORDERS_KNOWN:
        config = SimConfig(queue_order=order, **base)  # type: ignore[arg-type]
        made.append(Case(filled(order), config, both))
    return made


def of_class(name: str, part: str) -> Callable[[dict[str, Any]], float]:
    """The TTFT of one class."""

    def of(result: dict[str, Any]) -> float:
        found = result["by_class"].get(name)
        return float("nan") if found is None or found["ttft_s"] is None else float(found["ttft_s"][part])

    return of


def filled(order: str) -> str:
    return f"with batch, {order}"


def best_order(values: dict[str, dict[str, Estimated]]) -> str:
    """The order with the least interactive p99 TTFT; of several that are not shown to differ, the first."""
    return leaders(values, P99, [filled(order) for order in ORDERS_KNOWN], most=False)[0].removeprefix(filled(""))


def mixed_reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [f"{order} {relative(values, P99, filled(order), ALONE)}" for order in ORDERS_KNOWN]
    busy = told(values[filled("edf")]["prefill utilisation"], ".2f")
    best = best_of(values, P99, {filled(order): order for order in ORDERS_KNOWN}, most=False)
    mean = relative(values, "interactive mean TTFT, s", filled(best_order(values)), ALONE)
    waits = (
        ": steps are not interrupted, so an interactive prompt waits for the end of a batch chunk of up to 8,192 tokens"
        if mean.startswith("+")
        else ""
    )
    return (
        f"Interactive p99 TTFT against interactive requests alone, at a utilisation of {busy}: {', '.join(said)}; "
        f"{best}. Their mean changes by {mean} with {best_order(values)}{waits}."
    )


def mixed_goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    best = best_order(values)
    busy = values[filled(best)]["prefill utilisation"].mean
    text = f"interactive p99 TTFT with batch filling to {busy:.2f} ({best}), over interactive alone"
    found = at_most(text, "<= 1.2x at 0.9", times(values, P99, filled(best), ALONE), 1.2, ".2f", "x")
    return [found if busy >= 0.88 else replace(found, met=False)]


MIXED = Ablation(
    "classes",
    "What does batch work cost interactive requests, by the order of the queue?",
    f"8P+8D; the conversation trace is interactive, {BATCH_PER_S:g} batch prompts a second (lognormal around 8,000 "
    "tokens, nothing shared) fill the prefill nodes.",
    mixed_cases,
    {
        P99: of_class("interactive", "p99"),
        "interactive mean TTFT, s": of_class("interactive", "mean"),
        "batch mean TTFT, s": of_class("batch", "mean"),
        "batch p99 TTFT, s": of_class("batch", "p99"),
    },
    mixed_reading,
    goals=mixed_goals,
)
