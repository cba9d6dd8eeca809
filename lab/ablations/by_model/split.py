"""The split of the nodes into prefill and decode nodes."""

from __future__ import annotations

from lab.ablations.by_model.sized import (
    FIRST,
    MODELS,
    NODES,
    OTHERS,
    POOL_BLOCKS,
    WANTED,
    Values,
    config,
    definition,
    planned,
    work,
)
from lab.ablations.common.ablation import Ablation, Case, Estimated
from lab.ablations.common.evidence import shown, weighted
from lab.ablations.common.metrics import metrics

SPLITS = (2, 4, 6, 8, 10, 11, 12, 13, 14, 15)
ONE_POINT = 0.01


def label(model: str, prefill: int) -> str:
    return f"{model}, {prefill}P{NODES - prefill}D"


def cases(requests: int | None) -> list[Case]:
    return [
        Case(
            label(model, prefill),
            config(model, prefill, pool_blocks=POOL_BLOCKS),
            work(model, requests, 1.0),
            ttft_slo_s=WANTED.ttft_s,
            tbt_slo_s=WANTED.tbt_s,
            series=model,
            x=prefill,
        )
        for model in MODELS
        for prefill in sorted({*SPLITS, planned(model, requests)})
    ]


def good(values: Values, model: str) -> list[int]:
    """The numbers of prefill nodes for which the share of effective requests is not shown to be more than ONE_POINT
    below that of another number: seeds differ by about as much."""
    shares = {
        int(name.removeprefix(f"{model}, ").partition("P")[0]): of["effective"]
        for name, of in values.items()
        if name.startswith(f"{model}, ")
    }
    margin = Estimated(ONE_POINT, 0.0, (ONE_POINT,) * len(next(iter(shares.values())).samples))
    return [
        prefill
        for prefill, share in sorted(shares.items())
        if not any(shown(weighted((1.0, share), (1.0, margin), (-1.0, other))) < 0 for other in shares.values())
    ]


def reading(values: Values) -> str:
    found = {model: good(values, model) for model in MODELS}
    told = ", ".join(f"{model} {nodes[0]} to {nodes[-1]}" for model, nodes in found.items())
    of = {model: sum(name.startswith(f"{model}, ") for name in values) for model in MODELS}
    told += "".join(
        f" (no number of {model} is shown to be worse)" for model in MODELS if len(found[model]) == of[model]
    )
    moves = "; ".join(
        f"{model} gets by with {_change(found[model][0] - found[FIRST][0])}"
        for model in OTHERS
        if len(found[model]) < of[model] and len(found[FIRST]) < of[FIRST]
    )
    return (
        f"Prefill nodes of {NODES} with which the share of effective requests is not shown to be more than a point "
        f"below that with another number: {told}." + (f" Compared with {FIRST}, {moves}." if moves else "")
    )


def _change(nodes: int) -> str:
    if not nodes:
        return "as many, no fewer"
    return f"{abs(nodes)} {'more' if nodes > 0 else 'fewer'}"


SPLIT = Ablation(
    "split-by-model",
    "How many of 16 nodes should prefill, by the groups of the model's KV?",
    f"{definition()} Effective = within both objectives.",
    cases,
    metrics("effective", "mean TTFT, s", "mean TPOT, ms", "moved, TB"),
    reading,
    x_name="prefill nodes of 16",
)
