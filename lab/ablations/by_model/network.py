"""The network that a model needs for found prefixes and hand-overs."""

from __future__ import annotations

from lab.ablations.by_model.sized import (
    FIRST,
    MODELS,
    NEAR,
    OTHERS,
    POOL_BLOCKS,
    Values,
    config,
    definition,
    planned,
    work,
)
from lab.ablations.common.ablation import Ablation, Case
from lab.ablations.common.evidence import near_from
from lab.ablations.common.looks import answer_times
from lab.ablations.common.metrics import metric, metrics

GBIT = (100, 200, 400, 800, 1600, 3200)


def label(model: str, gbit: int) -> str:
    return f"{model}, {gbit} Gbit/s"


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label(model, gbit),
            config(model, planned(model, requests), cache_blocks=0, pool_blocks=POOL_BLOCKS, nic_gbit_s=float(gbit)),
            work(model, requests, 0.5),
            look=(answer_times,),
            series=model,
            x=gbit,
        )
        for model in MODELS
        for gbit in GBIT
    ]


def reading(values: Values) -> str:
    needed = {model: enough(values, model) for model in MODELS}
    told = ", ".join(
        f"{model} {gbit} Gbit/s" if gbit else f"with {model} none below is shown to be enough"
        for model, gbit in needed.items()
    )
    first = needed[FIRST]
    ratios = [f"{model} {gbit / first:.3g} times" for model in OTHERS if (gbit := needed[model]) and first]
    return (
        f"The least network with which an answer takes at most {NEAR:.0%} longer than at {GBIT[-1]} Gbit/s: {told}."
        + (f" {' and '.join(ratios)} that of {FIRST}." if ratios else "")
    )


def enough(values: Values, model: str) -> int | None:
    """The least network from which on every one is shown to be within NEAR of the best; None if only the best is."""
    cases = {label(model, gbit): gbit for gbit in GBIT}
    found = cases[near_from(values, "mean answer, s", list(cases), 1 + NEAR)]
    return None if found == GBIT[-1] else found


NETWORK = Ablation(
    "network-by-model",
    "Which network does a model need, by the groups of its KV?",
    f"{definition('half of')} The split is that of the formula; every found prefix and every hand-over moves.",
    cases,
    {"mean answer, s": metric("answer_s")} | metrics("mean TTFT, s", "hit rate", "moved, TB"),
    reading,
    x_name="network of a node, Gbit/s",
)
