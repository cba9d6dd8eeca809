"""The network that a model needs for found prefixes and hand-overs."""

from __future__ import annotations

from collections.abc import Sequence

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
    needed = {
        model: least(GBIT, [values[label(model, gbit)]["mean answer, s"].mean for gbit in GBIT]) for model in MODELS
    }
    told = ", ".join(f"{model} {gbit} Gbit/s" for model, gbit in needed.items())
    ratios = " and ".join(f"{model} {needed[model] / needed[FIRST]:.3g} times" for model in OTHERS)
    return (
        f"The least network with which an answer takes at most {NEAR:.0%} longer than at {GBIT[-1]} Gbit/s: {told}. "
        f"{ratios} that of {FIRST}."
    )


def least(sizes: Sequence[int], costs: Sequence[float]) -> int:
    """The smallest size from which on every cost is within NEAR of the last one."""
    limit = (1 + NEAR) * costs[-1]
    enough = len(sizes) - 1
    while enough and costs[enough - 1] <= limit:
        enough -= 1
    return sizes[enough]


NETWORK = Ablation(
    "network-by-model",
    "Which network does a model need, by the groups of its KV?",
    f"{definition('half of')} The split is that of the formula; every found prefix and every hand-over moves.",
    cases,
    {"mean answer, s": metric("answer_s")} | metrics("mean TTFT, s", "hit rate", "moved, TB"),
    reading,
    x_name="network of a node, Gbit/s",
)
