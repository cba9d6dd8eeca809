"""Algorithm 1 as in the paper, with a central Conductor that knows every queue: ask all nodes, choose the least TTFT.

A comparison with `mooncake` shows what a scheduler without a centre loses, and what the centre costs: one question to
every node per request.

The choice, not the estimates, adds *tolls* for what prompts and decodes of one node take from each other (view.py).
They are 0 on nodes of one role.
"""

from __future__ import annotations

from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.choice import Placement, Rejected
from sched.placement.costs import DecodeCosts, PrefillCosts, least
from sched.placement.demand import Demand
from sched.placement.few import MAX_FEW_NODES, Finder, place_few
from sched.placement.links import Vector
from sched.placement.two_stages import TwoStages
from sched.placement.view import View


class CentralGreedy(TwoStages):
    """Least TTFT, then the least time to decode among nodes with room; both with their tolls."""

    asks_everybody = True
    tolls = True
    _as_written = True  # no subclass overrides the choices, so few.py may replace them

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5, find: Finder | None = None) -> None:
        """find: a faster few.find_few, such as engine/front/compiled/choose.py."""
        super().__init__(limits, rng, threshold)
        self.find = find

    def __init_subclass__(cls) -> None:
        chosen = cls.choose_prefill, cls.choose_decode, cls._placed
        cls._as_written = chosen == (CentralGreedy.choose_prefill, CentralGreedy.choose_decode, CentralGreedy._placed)

    def place(self, now: float, demand: Demand, view: View, matched: Vector) -> Placement | Rejected:
        if self._as_written and len(view) <= MAX_FEW_NODES:
            placed = place_few(
                now, demand, view, matched, self.threshold, self.fetches, self.limits, self.drawn, self.find
            )
            if placed is not None:
                return placed
        return super().place(now, demand, view, matched)

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        return self.drawn(least(prompts_s(costs)))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        """The fastest node with room. If no node has room the request will wait, so choose the most free blocks."""
        if best := least(decodes_s(costs)):
            return self.drawn(best)
        return max(able, key=lambda i: float(costs.headroom[i]))


def prompts_s(costs: PrefillCosts) -> Vector:
    """[N] `ttft_s` and the toll of the prompt."""
    return costs.ttft_s + costs.work_s * costs.view.prompt_tolls()


def decodes_s(costs: DecodeCosts) -> Vector:
    """[N] `roomy_s()` and the tolls of the queue and of a first decode."""
    output_s = costs.token_s * float(costs.demand.output_tokens)
    return costs.roomy_s() + costs.view.queue_tolls_s() + output_s * costs.view.first_tolls()
