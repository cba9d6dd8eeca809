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


def good(values: Values, model: str) -> range:
    """From the fewest to the most prefill nodes with which the share of effective requests is within ONE_POINT of the
    best one: seeds differ by about as much."""
    shares = {
        int(name.removeprefix(f"{model}, ").partition("P")[0]): of["effective"].mean
        for name, of in values.items()
        if name.startswith(f"{model}, ")
    }
    near = [prefill for prefill, share in shares.items() if share >= max(shares.values()) - ONE_POINT]
    return range(min(near), max(near) + 1)


def reading(values: Values) -> str:
    found = {model: good(values, model) for model in MODELS}
    told = ", ".join(f"{model} {nodes[0]} to {nodes[-1]}" for model, nodes in found.items())
    moves = "; ".join(f"{model} gets by with {_change(found[model][0] - found[FIRST][0])}" for model in OTHERS)
    return (
        f"Prefill nodes of {NODES} with which the share of effective requests is within a point of the best: {told}. "
        f"Compared with {FIRST}, {moves}."
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
