"""A pipeline over nodes, divided tokens, or one node: by the length of a prompt and the number of nodes."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import above, relative
from lab.ablations.common.metrics import metric
from lab.ablations.groups.case import OVERLOADED, GroupCase
from lab.simulator.models.prefill_group import WAYS

KTOKENS = (8, 32, 128, 1024)
NODES = (1, 2, 4, 8)
LOAD = 0.5
SLOW_GBIT = 100.0
READ = 4
"""Nodes of the sentences."""

ALONE, BESIDE, FULL = "TTFT alone, s", "TTFT with shorts, s", "TTFT with a queue of shorts, s"
SHORT, LATE, RATE, BYTES = "mean TTFT of shorts, s", "p99 TTFT of shorts, s", "shorts/s in a queue", "received, GB"
OPEN = "shorts without a token at the end"
WAITING, COMPUTING = "waiting inside steps", "computing with a queue"
COST = "cost per million tokens"


def label(ktokens: int, nodes: int, way: str, gbit_s: float | None = None) -> str:
    slow = "" if gbit_s is None else f", {gbit_s:g} Gbit/s"
    return f"{ktokens}k, {nodes} {'node' if nodes == 1 else 'nodes'}, {way}{slow}"


def cases(requests: int | None) -> list[GroupCase]:
    """`requests`: short prompts of a run."""
    every: list[tuple[int, int, str, float | None]] = [
        (ktokens, nodes, way, None) for ktokens in KTOKENS for nodes in NODES for way in WAYS
    ]
    every += [(128, READ, way, SLOW_GBIT) for way in WAYS]
    return [
        GroupCase(label(*one), one[2], one[1], 1024 * one[0], LOAD, requests, one[3])
        for one in every
        if one[1] > 1 or one[2] == WAYS[0]
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    _, pipeline, context = WAYS
    told = [_against(values, ktokens, pipeline, context) for ktokens in KTOKENS]
    ours, theirs = (label(128, READ, way, SLOW_GBIT) for way in (pipeline, context))
    slow = relative(values, ALONE, theirs, ours)
    more = relative(values, BYTES, theirs, ours)
    return (
        f"Divided tokens against a pipeline, {READ} nodes: {'; '.join(told)}. At {SLOW_GBIT:g} Gbit/s TTFT of 128k "
        f"alone changes by {slow}; the bytes that a node receives by {more}. The paper gives two reasons against "
        "dividing tokens: less utilization, and more traffic next to the KV transfer. The hand-over is not simulated, "
        f"so the traffic competes with nothing here.{_overloaded(values)}"
    )


def _overloaded(values: dict[str, dict[str, Estimated]]) -> str:
    """A sentence that names the cases whose queue of short prompts grows; else empty."""
    found = [f'"{case}"' for case, of in values.items() if above(of[OPEN], OVERLOADED)]
    if not found:
        return ""
    return f" Overloaded, so that the short prompts have no TTFT but that of the length of the run: {', '.join(found)}."


def _against(values: dict[str, dict[str, Estimated]], ktokens: int, pipeline: str, context: str) -> str:
    ours, theirs = label(ktokens, READ, pipeline), label(ktokens, READ, context)
    words = ((ALONE, "TTFT alone"), (BESIDE, "with short prompts"), (SHORT, "mean TTFT of the short prompts"))
    return f"{ktokens}k {', '.join(f'{word} {relative(values, name, theirs, ours)}' for name, word in words)}"


LONG_PROMPTS = Ablation(
    "long-prompts",
    "What computes a long prompt on several nodes best, and what does it cost short prompts?",
    f"Long prompts one after the other on all nodes, with short ones of 500 to 1,500 tokens: none, {LOAD:.0%} of the "
    "nodes' time, or enough for every node to have some at any time. A chunk of a long prompt and a step of short "
    "ones take turns, as on nodes, whatever their length. Every short prompt that arrives before the end of the last "
    f"long one counts; a run in which {OVERLOADED:.0%} of them have no token then tells no TTFT of them. Cost: 1 per "
    "node and hour, over the tokens of all prompts with a queue of short ones.",
    cases,
    {
        ALONE: metric("alone_s"),
        BESIDE: metric("beside_s"),
        FULL: metric("full_s"),
        SHORT: metric("short_s"),
        LATE: metric("short_p99_s"),
        OPEN: metric("open"),
        RATE: metric("shorts_per_s"),
        COMPUTING: metric("computing"),
        WAITING: metric("waiting_alone"),
        "bubbles alone": metric("idle_alone"),
        BYTES: metric("received_gb"),
        COST: metric("cost"),
        "node-hours with a queue": metric("node_hours"),
    },
    reading,
    paper_source="no figure of this: section 5.1 gives the reasons in words",
    x_name="nodes",
)
