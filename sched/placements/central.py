"""Algorithm 1 as the paper has it, a central Conductor that knows every queue: ask everybody, take the least TTFT.

Beside `mooncake` it shows what the missing centre costs: one question to every node per request.
"""

from __future__ import annotations

from sched.placements.costs import DecodeCosts, PrefillCosts, least
from sched.placements.two_stages import TwoStages


class CentralGreedy(TwoStages):
    """Least TTFT, then least time to decode among those with room."""

    asks_everybody = True

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(costs.ttft_s))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        """The soonest of those with room; without room anywhere the request will wait: where most blocks are free."""
        roomy = costs.roomy_s()
        if best := least(roomy):
            return self.drawn(best)
        return max(able, key=lambda i: float(costs.headroom[i]))
