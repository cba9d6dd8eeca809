"""What Algorithm 1 is compared with: the baselines of the paper and of other systems, each a few lines.

random          any node that can: the floor every policy must beat
round-robin     in turn
least-load      the shortest queue, whatever is cached (load balancing, papers.md section 7)
local-cache     Algorithm 1, but no KV moves between prefill nodes (local cache-aware)
power-of-two    the better of two drawn, both asked: robust however old the gossip is
dynamo-cost     NVIDIA Dynamo's router: blocks to prefill and blocks being decoded, a weighted sum
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sched.placements.central import CentralGreedy
from sched.placements.costs import DecodeCosts, PrefillCosts, least
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.two_stages import TwoStages
from sched.placements.view import View


class RandomPlacement(TwoStages):
    """Draws."""

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.rng.choice(able)

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.rng.choice(able)


class RoundRobin(TwoStages):
    """Each acceptor counts for itself."""

    prefills = decodes = 0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        self.prefills += 1
        return able[self.prefills % len(able)]

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        self.decodes += 1
        return able[self.decodes % len(able)]


class LeastLoad(TwoStages):
    """Least prefill work queued; fewest running requests."""

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(costs.wait_s, able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.running, able))


class LocalCache(CentralGreedy):
    """Algorithm 1 without step 3's fetch: least queue and prefill behind the node's own prefix."""

    fetches = False


class PowerOfTwo(TwoStages):
    """Draws two per stage before it asks, so that the answer is about them."""

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        pools = (np.flatnonzero(np.isfinite(column)).tolist() for column in (view.open_at, view.closed_decode))
        return list(dict.fromkeys(i for able in pools for i in self._two(able)))

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(costs.ttft_s, self._two(able)))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.decode_s, self._two(able)))

    def _two(self, able: list[int]) -> list[int]:
        return able if len(able) <= 2 else self.rng.sample(able, 2)


class DynamoCost(TwoStages):
    """prefill: queued + new blocks to compute, less what is cached; decode: blocks in use + those of the request.

    Dynamo weights a cached block by its tier (1 on the device); the records tell no tiers, so it counts 1 here. Decode
    is chosen behind prefill, as its disaggregated router does."""

    asks_everybody = True
    fetches = False
    overlap_weight = 1.0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        blocks = costs.view.queued_tokens + costs.demand.num_tokens - self.overlap_weight * costs.local
        return self.drawn(least(np.maximum(blocks, 0.0), able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self.drawn(least(costs.view.total_blocks - costs.view.free_blocks, able))
