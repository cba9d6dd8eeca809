"""Prefill and decode on separate nodes, or mixed in steps: by the length of answers, and against a formula.

The formula (lab/formulas/roofs.py) names the way that takes less node time per request. Both ways get the same load:
the one at which the mean of their node times fills all nodes. So the way that takes less has room for it, and the
other one has not; with time its queue grows.
"""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import UNSHOWN, relative, sign
from lab.ablations.common.metrics import metrics
from lab.formulas.roofs import apart_s, chunking_s, decode_batch, decode_share
from lab.loads.changes import Alike
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import PRESETS

MODEL = PRESETS["llama3-70b-8xa800"]
NODES = 16
PROMPT = 8192
TBT_S = 0.1
LENGTHS = (1, 16, 64, 256, 1024)
SHORT = (1, 16)
APART, MIXED = "separate", "mixed"
TTFT = "mean TTFT, s"


def label(way: str, answer: int) -> str:
    return f"{way}, answers of {answer}"


def split(answer: int) -> int:
    """The prefill nodes of NODES: whole nodes, by the share of the node time that prompts take."""
    decode_s = answer * decode_share(MODEL, PROMPT, TBT_S)
    prompt_s = MODEL.prompt_s(PROMPT, 0)
    return min(NODES - 1, max(1, round(NODES * prompt_s / (prompt_s + decode_s))))


def rate_s(answer: int) -> float:
    """Requests per second at which the mean node time of both ways fills all nodes."""
    return 2 * NODES / (apart_s(MODEL, PROMPT, answer, TBT_S) + chunking_s(MODEL, PROMPT, answer, TBT_S))


def cases(requests: int | None) -> list[Case]:
    made = []
    most = replace(MODEL, max_batch=decode_batch(MODEL, PROMPT, TBT_S))
    base = SimConfig(cache_blocks=0, batching_policy="dynamic", tbt_budget_s=TBT_S)
    for answer in LENGTHS:
        work = Workload("unique", min(requests or 2000, 2000), change=Alike(PROMPT, answer, rate_s(answer)))
        ways = {
            APART: (replace(base, prefill=split(answer), decode=NODES - split(answer)), most),
            MIXED: (replace(base, prefill=0, decode=0, mixed=NODES, tolls=False), MODEL),  # every node does both
        }
        for way, (config, model) in ways.items():
            made.append(Case(label(way, answer), config, work, 30.0, TBT_S, model=model, series=way, x=answer))
    return made


def formula(answer: int) -> int:
    """1 if mixed steps take more node time, -1 if separate nodes do."""
    mixed_s, split_s = chunking_s(MODEL, PROMPT, answer, TBT_S), apart_s(MODEL, PROMPT, answer, TBT_S)
    return 1 if mixed_s > split_s else -1


def agreement(values: dict[str, dict[str, Estimated]], answer: int) -> int:
    """1 where the simulator's way of the lower mean TTFT is the formula's, -1 where it is the other one, 0 where the
    intervals separate none."""
    return formula(answer) * sign(values, TTFT, label(MIXED, answer), label(APART, answer))


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    found = {answer: agreement(values, answer) for answer in LENGTHS}
    named = {1: "agrees with the formula", -1: "contradicts the formula", 0: f"says nothing ({UNSHOWN})"}
    said = [
        f"{words} at answers of {', '.join(map(str, lengths))}"
        for side, words in named.items()
        if (lengths := [answer for answer, of in found.items() if of == side])
    ]
    gains = "; ".join(
        f"{answer}: {relative(values, TTFT, label(APART, answer), label(MIXED, answer))}" for answer in LENGTHS
    )
    by_formula = {1: "separate nodes", -1: "mixed steps"}
    expected = "; ".join(f"{answer}: {by_formula[formula(answer)]}" for answer in LENGTHS)
    words = {1: "pay for separate nodes", -1: "do not pay for separate nodes", 0: f"decide nothing ({UNSHOWN})"}
    short = " and ".join(
        f"of {answer} {words[sign(values, TTFT, label(MIXED, answer), label(APART, answer))]}" for answer in SHORT
    )
    return (
        f"The formula of node time expects as the better way, by tokens of an answer: {expected}. The simulator "
        f"{' and '.join(said)}. Mean TTFT of separate nodes against mixed ones: {gains}. Short answers {short}. "
        "The formula knows fractions of nodes and a full batch at any load; a cluster has whole nodes, and a step "
        "without decodes has no gap to keep, so that its prompts come in whole chunks."
    )


ANSWERS = Ablation(
    "answers",
    "Do short answers pay for separate prefill and decode nodes?",
    f"{NODES} nodes; prompts of {PROMPT} tokens without shared blocks, all answers of one length, Poisson arrivals at "
    f"the rate at which the mean node time of both ways fills all nodes; steps keep {1000 * TBT_S:.0f} ms between "
    "tokens (--batching-policy dynamic on mixed nodes, the largest batch on decode nodes).",
    cases,
    metrics(TTFT, "p99 TTFT, s", "effective", "mean TPOT, ms", "p99 longest gap, ms"),
    reading,
    x_name="tokens of an answer",
)
