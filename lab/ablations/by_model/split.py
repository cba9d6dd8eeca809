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
from lab.ablations.common.ablation import Ablation, Case
from lab.ablations.common.metrics import metrics

SPLITS = (2, 4, 6, 8, 10, 11, 12, 13, 14, 15)


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


def best(values: Values, model: str) -> tuple[str, float]:
    """(the split with most effective requests, their share)"""
    shares = {
        name.removeprefix(f"{model}, "): of["effective"].mean
        for name, of in values.items()
        if name.startswith(f"{model}, ")
    }
    name = max(shares, key=lambda split: shares[split])
    return name, shares[name]


def reading(values: Values) -> str:
    found = {model: best(values, model) for model in MODELS}
    told = ", ".join(f"{model} {name} ({share:.1%})" for model, (name, share) in found.items())
    nodes = {model: int(name.partition("P")[0]) for model, (name, _) in found.items()}
    moves = "; ".join(f"{model} wants {_change(nodes[model] - nodes[FIRST])}" for model in OTHERS)
    return f"Most effective requests: {told}. Compared with {FIRST}, {moves}."


def _change(nodes: int) -> str:
    if not nodes:
        return "as many prefill nodes"
    count = f"{abs(nodes)} prefill node{'s' if abs(nodes) > 1 else ''}"
    return f"{count} {'more' if nodes > 0 else 'fewer'}"


SPLIT = Ablation(
    "split-by-model",
    "How many of 16 nodes should prefill, by the groups of the model's KV?",
    f"{definition()} Effective = within both objectives.",
    cases,
    metrics("effective", "mean TTFT, s", "mean TPOT, ms", "moved, TB"),
    reading,
    x_name="prefill nodes of 16",
)
