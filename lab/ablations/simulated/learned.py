"""A learned choice of the prefill node, with and without its guard, if records do not show which nodes are slow."""

from __future__ import annotations

import math
from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import relative, told
from lab.ablations.common.looks import guard
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

SLOW = ",".join(f"slow:prefill-{i}@0+1000000x1.6" for i in range(0, 8, 2))
UNGUARDED = {"guard_slack": 1e9, "guard_most_error": 1e9}
BOUND = SimConfig().guard_slack
LEARNERS = {
    "learned from times to first token": {},
    "perfect": {"predictor": "perfect"},
    "noisy (30 %)": {"predictor": "noisy", "predictor_noise": 0.3},
    "noisy (100 %)": {"predictor": "noisy", "predictor_noise": 1.0},
    "inverted": {"predictor": "inverted"},
    "inverted, always believed": {"predictor": "inverted", "guard_most_error": 1e9},
    "perfect, no guard": {"predictor": "perfect", **UNGUARDED},
    "noisy (100 %), no guard": {"predictor": "noisy", "predictor_noise": 1.0, **UNGUARDED},
    "inverted, no guard": {"predictor": "inverted", **UNGUARDED},
}
KNOWN, UNKNOWN = "Algorithm 1, speeds known", "Algorithm 1, speeds unknown"
GUARDED = [name for name in LEARNERS if "no guard" not in name]


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 4000, 4000))
    unknown = SimConfig(pool_blocks=6000, faults=SLOW, detect_s=1e9)
    made = [
        Case(KNOWN, replace(unknown, detect_s=0.0), work),
        Case(UNKNOWN, unknown, work),
    ]
    base = replace(unknown, placement="mooncake-learned")
    for name, change in LEARNERS.items():
        made.append(Case(name, replace(base, **change), work, look=(guard,)))  # type: ignore[arg-type]
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [f"{name} {relative(values, 'mean TTFT, s', name, UNKNOWN)}" for name in LEARNERS]
    return (
        f"Mean TTFT against Algorithm 1 without knowledge of the speeds: {', '.join(said)}; with it "
        f"{relative(values, 'mean TTFT, s', KNOWN, UNKNOWN)}. The guard bounds a single choice by its estimate, not "
        "the mean TTFT of a run: a bad choice also delays later requests in the queue."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    found = [values[name]["chosen / least estimate, most"] for name in GUARDED]
    # The bound holds for every run, so the worst run decides: not a mean, and no interval.
    worst = max((run for one in found for run in one.samples or (one.mean,)), key=lambda run: (math.isnan(run), run))
    text = "guarded placement: estimate of the chosen node over the least one, in the worst run"
    return [Goal(text, f"<= {BOUND:g}", told(Estimated(worst, math.nan), ".3f"), worst <= BOUND * (1 + 1e-9))]


LEARNED = Ablation(
    "learned",
    "What may a predictor gain or break if it chooses only inside the envelope of Algorithm 1?",
    "8P+8D, conversation trace; every other prefill node computes 1.6 times as long as its records say, and no node is "
    f"told. Guard: estimates within {BOUND:g} of the least, and belief only below 30 % error or the rule's own.",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s")
    | {
        "chosen / least estimate, most": metric("worst_estimate_ratio"),
        "choices unlike the rule's": metric("departed"),
        "its error": metric("predictor_error"),
        "the rule's error": metric("rule_error"),
    },
    reading,
    goals=goals,
)
