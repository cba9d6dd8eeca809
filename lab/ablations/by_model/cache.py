"""The size of the cache that a model needs, and the distance between pooled states."""

from __future__ import annotations

from cache.groups import PoolRule
from lab.ablations.by_model.sized import HARDWARE, MODELS, NEAR, Values, config, definition, planned, work
from lab.ablations.common.ablation import Ablation, Case
from lab.ablations.common.evidence import best_of, near_from, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig
from lab.simulator.models.presets import chosen

GBYTES = (16, 32, 64, 128, 256, 512)
STATES = (1, 8, 32)  # blocks from one pooled state to the next
USUAL = 8
WITH_STATES = "Qwen3-Next-80B"
VARIANTS = [(model, USUAL) for model in MODELS] + [(WITH_STATES, every) for every in STATES if every != USUAL]
"""(model, blocks from one pooled state to the next)"""


def named(model: str, every: int) -> str:
    return f"{model}, a state every {every} blocks" if model == WITH_STATES else model


def label(model: str, every: int, gbytes: int) -> str:
    return f"{named(model, every)}, {gbytes} GB"


def cases(requests: int | None) -> list[Case]:
    made = []
    for model, every in VARIANTS:
        block_bytes = chosen("", model, HARDWARE, PoolRule(state_every=every)).block_bytes(SimConfig().block_tokens)
        for gbytes in GBYTES:
            more = {"cache_blocks": 0, "pool_blocks": int(gbytes * 1e9 / block_bytes), "state_every": every}
            made.append(
                Case(
                    label(model, every, gbytes),
                    config(model, planned(model, requests), **more),
                    work(model, requests, 0.5),
                    series=named(model, every),
                    x=gbytes,
                )
            )
    return made


def reading(values: Values) -> str:
    sizes = {model: enough(values, model) for model in MODELS}
    said = ", ".join(
        f"{model} {gbytes} GB" if gbytes else f"with {model} none below is shown to be enough"
        for model, gbytes in sizes.items()
    )
    at = sizes[WITH_STATES] or GBYTES[-1]
    states = {label(WITH_STATES, every, at): f"{every} blocks" for every in STATES}
    hits = ", ".join(f"{name} {told(values[case]['hit rate'], '.3f')}" for case, name in states.items())
    return (
        f"The least cache per node that finds {1 - NEAR:.0%} of what {GBYTES[-1]} GB find: {said}. At {at} GB, the hit "
        f"rate of {WITH_STATES} by the distance between pooled states: {hits}; {best_of(values, 'hit rate', states)}."
    )


def enough(values: Values, model: str) -> int | None:
    """The least cache from which on every one is shown to find nearly as much as the largest; None if only that
    does."""
    cases = {label(model, USUAL, gbytes): gbytes for gbytes in GBYTES}
    found = cases[near_from(values, "hit rate", list(cases), 1 - NEAR)]
    return None if found == GBYTES[-1] else found


CACHE = Ablation(
    "cache-by-model",
    "How large must the cache be, by the groups of the model's KV?",
    f"{definition('half of')} The split is that of the formula; the pool in the memory of the nodes is the only cache. "
    "A prefix of a model with states is found up to a pooled state.",
    cases,
    metrics("hit rate", "mean TTFT, s"),
    reading,
    x_name="cache of a node, GB",
)
