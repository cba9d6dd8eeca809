"""The cost of a lost node, a slow node and lost gossip."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import points, relative, told
from lab.ablations.common.goals import at_most, largest
from lab.ablations.common.looks import Back
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

AT_S = 100.0
WHOLE = "no fault"
LOST = ("a prefill node is lost", "a decode node is lost")
FAULTS = {
    WHOLE: {},
    "a prefill node is lost": {"faults": "crash:prefill-0@100+60"},
    "a decode node is lost": {"faults": "crash:decode-0@100+60"},
    "a prefill node is 4 times slower": {"faults": "slow:prefill-0@100+300x4"},
    "a crash every 60 s": {"crash_every_s": 60.0},
    "half of the records lost": {"gossip_loss": 0.5},
}


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 4000, 4000))
    base = SimConfig(pool_blocks=6000)
    return [
        Case(name, replace(base, **change), work, look=(Back(AT_S),))  # type: ignore[arg-type]
        for name, change in FAULTS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    lost = [
        f"{name} {points(values, 'goodput', name, WHOLE)}, TTFT {relative(values, 'mean TTFT, s', name, WHOLE)}"
        for name in FAULTS
        if name != WHOLE
    ]
    back = [f"{name} {told(values[name]['good again after, s'], '.0f', ' s')}" for name in LOST]
    return (
        "Good again (95 % of the requests that arrive): " + ", ".join(back)
        + ". Against no fault, goodput and mean TTFT: " + "; ".join(lost) + ". The loss of a node is known after a "
        "fixed time here; on real nodes, when a connection breaks or gossip reports it: scripts/faults.py kill-roles."
    )  # fmt: skip


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    back = largest(values[name]["good again after, s"] for name in LOST)
    return [at_most("goodput at 95 % after the loss of one node of 16", "<= 5 s", back, 5.0, ".0f", " s")]


FAILURE = Ablation(
    "failure",
    "What do a lost node, a slow node and lost gossip cost?",
    "8P+8D, conversation trace; a lost node is back, empty, after 60 s (30 s with random crashes), and its loss "
    "is known after 1 s. Good = TTFT <= 30 s and no gap above 2 s, by windows of 5 s of arrival; a "
    "record that a gossip round does not deliver stays unchanged.",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s", "goodput")
    | {
        "p99 longest gap, s": metric("longest_gap_s", "p99"),
        "attempts lost": metric("retries"),
        "good again after, s": metric("back_after_s"),
    },
    reading,
    goals=goals,
)
