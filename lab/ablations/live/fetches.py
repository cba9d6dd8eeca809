"""The fetches of real nodes from the pool, by the timelines of requests: tokens by tier, and how fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.handoff.borrowing import ARENA
from lab.bench.common.client import Outcome
from lab.launch import rest


@dataclass(frozen=True, slots=True)
class Fetches:
    """Of some requests. bytes/s: of fetches from DRAM alone, and of those from SSD alone; 0 = there was none."""

    fetches: int
    dram_tokens: int
    ssd_tokens: int
    dram_bytes_s: float
    ssd_bytes_s: float

    @property
    def ssd_alone_bytes_s(self) -> float:
        """Of the SSD without the way to the reader; 0 = not known."""
        if not self.ssd_bytes_s:
            return 0.0
        left = 1 / self.ssd_bytes_s - (1 / self.dram_bytes_s if self.dram_bytes_s else 0.0)
        return 1 / left if left > 0 else self.ssd_bytes_s


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
    tokens, spent, count = {"dram": 0, "ssd": 0}, {"dram": [0.0, 0.0], "ssd": [0.0, 0.0]}, 0
    for detail in details:
        if ARENA in detail["tiers"] or "site" in detail:
            continue
        count += 1
        tiers = {tier: blocks for tier, blocks in detail["tiers"].items() if blocks}
        for tier, blocks in tiers.items():
            tokens[tier] += blocks * block_tokens
        if len(tiers) == 1:
            of_tier = spent[next(iter(tiers))]
            of_tier[0] += detail["bytes"]
            of_tier[1] += detail["seconds"]
    rates = {tier: nbytes / seconds if seconds else 0.0 for tier, (nbytes, seconds) in spent.items()}
    return Fetches(count, tokens["dram"], tokens["ssd"], rates["dram"], rates["ssd"])
