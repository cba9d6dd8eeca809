"""The fetches of real nodes from the pool, by the timelines of requests: tokens by tier, and how fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.handoff.borrowing import ARENA
from lab.bench.common.client import Outcome
from lab.launch import rest
from lab.simulator.models.step_models import StepModel
from sched.cost import Regression

Seen = tuple[tuple[float, float, float], float]
"""(1, bytes, bytes from SSD) and seconds of a fetch."""


PRIOR = (1e-3, 1 / 4e9, 1 / 3e9)
"""Coefficients of `costs` before the first fetch."""


@dataclass(frozen=True, slots=True)
class Fetches:
    """Of some requests. bytes/s: of fetches from DRAM alone, and of those from SSD alone; 0 = there was none. `costs`:
    a fetch takes c0 + c1 bytes + c2 bytes from SSD, fitted to all of them; None = there was none."""

    fetches: int
    dram_tokens: int
    ssd_tokens: int
    dram_bytes_s: float
    ssd_bytes_s: float
    costs: tuple[float, float, float] | None = None

    def told(self, model: StepModel) -> StepModel:
        """The model with these costs. What no fetch showed stays as the model has it: the SSD, if none came from it."""
        if self.costs is None:
            return model
        fixed_s, byte_s, ssd_byte_s = self.costs
        model = replace(model, nic_latency_s=fixed_s, nic_bytes_s=1 / max(byte_s, LEAST_BYTE_S))
        return replace(model, ssd_bytes_s=1 / max(ssd_byte_s, LEAST_BYTE_S)) if self.ssd_tokens else model


LEAST_BYTE_S = 1e-11
"""A fit may find that bytes cost nothing; 100 GB/s are as good as that."""


def fetches(url: str, outcomes: Sequence[Outcome], block_tokens: int, api_key: str | None = None) -> Fetches:
    """url: of a node of their cluster; nodes remember the last requests. Raises RestError."""
    ids = [one.request_id for one in outcomes if one.error is None]
    records = [rest.get(f"{url}/live/requests/{name}", api_key) for name in ids]
    return summed((event["detail"] for record in records for event in fetched_of(record)), block_tokens)


def fetched_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [event for event in record["events"] if event["event"] == "prefix_fetched"]


def summed(details: Iterable[Mapping[str, Any]], block_tokens: int) -> Fetches:
    """details: of the events `prefix_fetched`. What came from the arena of another node or over
    the link from another site is none from the pool."""
    tokens, spent, seen = {"dram": 0, "ssd": 0}, {"dram": [0.0, 0.0], "ssd": [0.0, 0.0]}, list[Seen]()
    for detail in details:
        if ARENA in detail["tiers"] or "site" in detail:
            continue
        tiers = {tier: blocks for tier, blocks in detail["tiers"].items() if blocks}
        for tier, blocks in tiers.items():
            tokens[tier] += blocks * block_tokens
        if not tiers:
            continue
        share = tiers.get("ssd", 0) / sum(tiers.values())
        seen.append(((1.0, float(detail["bytes"]), share * detail["bytes"]), detail["seconds"]))
        if len(tiers) == 1:
            of_tier = spent[next(iter(tiers))]
            of_tier[0] += detail["bytes"]
            of_tier[1] += detail["seconds"]
    rates = {tier: nbytes / seconds if seconds else 0.0 for tier, (nbytes, seconds) in spent.items()}
    return Fetches(len(seen), tokens["dram"], tokens["ssd"], rates["dram"], rates["ssd"], _costs(seen))


def _costs(seen: Sequence[Seen]) -> tuple[float, float, float] | None:
    """Scaled to the total time of these, as the steps are (lab/simulator/models/fit.py)."""
    if not seen:
        return None
    regression = Regression(PRIOR, window=len(seen))
    for features, seconds in seen:
        regression.observe(features, seconds)
    shape = regression.refit()
    predicted = sum(c * x for features, _ in seen for c, x in zip(shape, features, strict=True))
    scale = sum(seconds for _, seconds in seen) / predicted
    c0, c1, c2 = (scale * c for c in shape)
    return c0, c1, c2
