"""How much of the pool's prefix is worth a fetch: it may take longer to read from SSD than to compute.

A node computes on from the first token that lies only on SSD, or it waits until all of the prefix is in DRAM.
`worth_fetching` judges the disk alone. `fetched` adds the transfer and judges one node, costs.py does so for all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sched.placement.costs import least_prefill_s
from sched.placement.demand import Demand
from sched.placement.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledPrefix:
    """Leading tokens of a prompt that the pool has."""

    tokens: int
    dram_tokens: int  # in front of the first that lies on SSD only
    ssd_tokens: int
    ssd_s: float  # until the last of those is in the DRAM of its home

    def worth_fetching(self, view: View) -> PooledPrefix:
        """The whole prefix; or the part in front of the SSD, if the quickest node of `view` computes what follows
        before it is read."""
        behind = self.tokens - self.dram_tokens
        if not self.ssd_tokens or self.ssd_s < least_prefill_s(view, behind, self.dram_tokens):
            return self
        return PooledPrefix(tokens=self.dram_tokens, dram_tokens=self.dram_tokens, ssd_tokens=0, ssd_s=0.0)


def fetched(view: View, i: int, demand: Demand, own: int) -> tuple[int, float]:
    """(leading tokens that node `i` has after the fetch that saves most time, its seconds): its `own` ones, in no time,
    if no fetch saves any."""
    latency_s, per_token_s = view.fetch(demand.fetch_token_bytes)
    best, saved_s, fetch_s = own, 0.0, 0.0
    for reach, disk_s in ((demand.pooled_tokens, demand.ssd_s), (demand.near_tokens if demand.ssd_s else 0, 0.0)):
        if reach > own:
            seconds = float(latency_s[i] + per_token_s[i] * (reach - own)) + disk_s
            saves_s = float(view.a1[i] + view.a2[i] * (reach + own)) * (reach - own) - seconds
            if saves_s > saved_s:
                best, saved_s, fetch_s = reach, saves_s, seconds
    return best, fetch_s
