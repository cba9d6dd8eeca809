"""The models, their nodes, and a load that suits each of them.

All models run by formula on the same nodes and get the conversation trace, each at a speed of its own: the highest rate
for which `scripts/plan.py plan` needs at most NODES nodes, or a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from cache.groups import PoolRule
from lab.ablations.common.ablation import Estimated, Workload, rows_of
from lab.formulas.bisect import Tried, largest
from lab.formulas.loads import load_of
from lab.formulas.plan import Decode, Infeasible, Objective, Prefill
from lab.simulator.config import SimConfig
from lab.simulator.models.presets import chosen

Values = Mapping[str, Mapping[str, Estimated]]
"""case -> metric -> value"""

MODELS = ("Llama-3-70B", "Kimi-K2", "Qwen3-Next-80B")
FIRST, *OTHERS = MODELS
HARDWARE = "16xh200"
NODES = 16
REQUESTS = 2000
POOL_BLOCKS = 6000  # of a node: everything fits
WANTED = Objective(2.0, 0.05)
NEAR = 0.1
"""A value within a tenth of the best one is as good."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The highest load of NODES nodes, and their split by formula."""

    speed: float  # over the trace's own
    prefill: int


@lru_cache
def sized(model: str, requests: int) -> Sized:
    """Raises ValueError."""
    rows = rows_of(Workload("conversation"), 0)[1]
    own = len(rows) / ((rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000)
    step_model, load = chosen("", model, HARDWARE, PoolRule()), load_of(rows[:requests], own, POOL_BLOCKS * NODES)

    def try_rate(rate: float) -> Tried:
        faster = replace(load, rate=rate)
        try:
            prefill = Prefill(step_model, faster).least(WANTED)
            nodes = prefill + Decode(step_model, faster).least(WANTED)
        except Infeasible:
            return Tried(rate, False, {})
        return Tried(rate, nodes <= NODES, {"prefill": prefill})

    best = max((tried for tried in largest(try_rate, own, 0.02) if tried.good), key=lambda tried: tried.load)
    return Sized(best.load / own, int(best.values["prefill"]))


def work(model: str, requests: int | None, share: float) -> Workload:
    """The load, at a share of the highest rate."""
    count = min(requests or REQUESTS, REQUESTS)
    return Workload("conversation", count, speed=share * sized(model, count).speed)


def planned(model: str, requests: int | None) -> int:
    """Prefill nodes, by formula."""
    return sized(model, min(requests or REQUESTS, REQUESTS)).prefill


def config(model: str, prefill: int, **more: object) -> SimConfig:
    base = {"model_geometry": model, "hardware": HARDWARE, "prefill": prefill, "decode": NODES - prefill}
    return SimConfig(**(base | more))  # type: ignore[arg-type]


def definition(share: str = "") -> str:
    """share: like "half of"."""
    return (
        f"{NODES} nodes of {HARDWARE}, step times by formula; the conversation trace, for each model at "
        f"{share}{' ' if share else ''}the highest rate at which {NODES} nodes keep a first token within "
        f"{WANTED.ttft_s:g} s and {1000 * WANTED.tbt_s:g} ms between tokens for {WANTED.share:.0%} of the requests, by "
        "the formula of a plan."
    )
