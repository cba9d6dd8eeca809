"""The size of the cache that a model needs, and the distance between pooled states."""

from __future__ import annotations

from collections.abc import Sequence

from cache.groups import PoolRule
from lab.ablations.by_model.sized import HARDWARE, MODELS, NEAR, Values, config, definition, planned, work
from lab.ablations.common.ablation import Ablation, Case
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
    rates = {one: [values[label(*one, gbytes)]["hit rate"].mean for gbytes in GBYTES] for one in VARIANTS}
    enough = {model: least(GBYTES, rates[model, USUAL]) for model in MODELS}
    told = ", ".join(f"{model} {gbytes} GB" for model, gbytes in enough.items())
    place = GBYTES.index(enough[WITH_STATES])
    by_state = {every: rates[WITH_STATES, every][place] for every in STATES}
    best = max(by_state, key=lambda every: by_state[every])
    hits = ", ".join(f"{every} blocks {rate:.3f}" for every, rate in by_state.items())
    return (
        f"The least cache per node that finds {1 - NEAR:.0%} of what {GBYTES[-1]} GB find: {told}. "
        f"At {GBYTES[place]} GB, the hit rate of {WITH_STATES} by the distance between pooled states: {hits}; {best} "
        "is best."
    )


def least(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """The smallest size from which on every rate is within NEAR of the last one."""
    wanted = (1 - NEAR) * rates[-1]
    enough = len(sizes) - 1
    while enough and rates[enough - 1] >= wanted:
        enough -= 1
    return sizes[enough]


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
