"""Placement by cost under the objective: of the nodes that meet it, one of the cheapest; if none does, the fastest.

    cost of a prompt    price of the node * seconds that it works on the prompt, without the queue
    cost of a token     price of the node * seconds per token when the prompt arrives there

Both follow from the node's own measured step times, so a cheap node that is slow may cost more than a dear one that is
fast. Nodes within CHEAP_RATIO of the least cost count as equally cheap, and the faster one is chosen: otherwise one of
several equal nodes would get a queue as long as the objective allows, while the others are idle. As the load of the
cheap nodes grows, they miss the objective, and the dear ones get requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sched.admission import Limits
from sched.classes import CLASSES, Classes
from sched.membership.member import Rng
from sched.placement.choice import Placement, Rejected, Stage
from sched.placement.costs import DecodeCosts, PrefillCosts, Row, prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.mooncake import SHORTLIST_SIZE, Compiled, MooncakePlacement, width_of
from sched.placement.view import View

HEADROOM = 0.8
"""Share of the objective that an estimate may take: estimates have errors, and more requests follow."""

CHEAP_RATIO = 1.1

HOUR_S = 3600

Price = Callable[[str], float]
"""Price of a node per hour."""


def equal_prices(node: str) -> float:
    """Every node costs 1 per hour."""
    return 1.0


@dataclass(slots=True)
class Priced:
    """A stage whose rows also have the price of the node per hour, and the cost of the request there."""

    stage: Stage
    price: Price

    @property
    def view(self) -> View:
        return self.stage.view

    def rows(self, most: int) -> list[Row]:
        return [self._priced(row) for row in self.stage.rows(most)]

    def _priced(self, row: Row) -> Row:
        price = self.price(row["node"])
        prefill = row["stage"] == "prefill"
        seconds = row["transfer_s"] + row["prefill_s"] if prefill else row["decode_s"] - row["handover_s"]
        return row | {"node_cost": price, "cost": price * seconds / HOUR_S}


class CheapestPlacement(MooncakePlacement):
    """Like `mooncake`, but the asked nodes include the cheapest ones, and one of these is chosen."""

    def __init__(
        self,
        limits: Limits,
        rng: Rng,
        threshold: float = 1.5,
        *,
        compiled: Compiled | None = None,
        classes: Classes = CLASSES,
        price: Price = equal_prices,
    ) -> None:
        super().__init__(limits, rng, threshold, compiled=compiled)
        self.classes, self.price = classes, price
        self._known: tuple[list[str], Vector] = [], np.zeros(0)

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        asked = super().shortlist(now, demand, view, matched)
        if not asked:
            return asked
        costs = prefill_costs(now, demand, view, matched, self.threshold, self.fetches)
        prompt = np.where(costs.ttft_s <= self._ttft_s(demand), self._prompt_cost(costs), np.inf)
        fits = (view.closed_decode == 0) & (view.free_blocks >= demand.num_blocks)
        token = np.where(fits & (view.step_s <= self._tbt_s(demand)), self._prices(view) * view.step_s, np.inf)
        return list(dict.fromkeys([*asked, *self._few(prompt, view), *self._few(token, view)]))

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        within = [i for i in able if costs.ttft_s[i] <= self._ttft_s(costs.demand)]
        if not within:
            return super().choose_prefill(costs, able)
        return self._fastest(_cheap(self._prompt_cost(costs), within), costs.ttft_s)

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        roomy = costs.roomy_s()
        within = [i for i in able if costs.token_s[i] <= self._tbt_s(costs.demand) and roomy[i] < np.inf]
        if not within:
            return super().choose_decode(costs, able)
        return self._fastest(_cheap(self._prices(costs.view) * costs.token_s, within), costs.decode_s)

    def _placed(self, prefill: PrefillCosts, source: int, decode: DecodeCosts, target: int) -> Placement | Rejected:
        placed = super()._placed(prefill, source, decode, target)
        stages = tuple(Priced(stage, self.price) for stage in placed.stages)
        if isinstance(placed, Rejected):
            return Rejected(placed.reason, placed.retry_after_s, placed.missing_role, stages)
        placed.stages = stages
        return placed

    def _ttft_s(self, demand: Demand) -> float:
        return HEADROOM * self.classes[demand.service_class].ttft_s

    def _tbt_s(self, demand: Demand) -> float:
        return HEADROOM * self.classes[demand.service_class].tbt_s

    def _prices(self, view: View) -> Vector:
        """[N]"""
        if self._known[0] is not view.ids:
            self._known = view.ids, np.array([self.price(node) for node in view.ids], dtype=np.float64)
        return self._known[1]

    def _prompt_cost(self, costs: PrefillCosts) -> Vector:
        """[N], infinite for nodes that cannot compute the prompt."""
        seconds: Vector = costs.ttft_s - costs.wait_s
        return np.where(seconds < np.inf, self._prices(costs.view) * np.minimum(seconds, 1e9), np.inf)

    def _few(self, cost: Vector, view: View) -> list[int]:
        """Some of the nodes with the least cost: the more, the older the state is."""
        order = cost.argsort(kind="stable")[: max(SHORTLIST_SIZE, width_of(view))]
        nodes: list[int] = order[cost[order] < np.inf].tolist()
        return nodes if len(nodes) <= SHORTLIST_SIZE else self._some(nodes)

    def _fastest(self, nodes: list[int], seconds: Vector) -> int:
        least = min(float(seconds[i]) for i in nodes)
        return self.drawn([i for i in nodes if seconds[i] <= least])


def _cheap(cost: Vector, nodes: list[int]) -> list[int]:
    """Those within CHEAP_RATIO of the least cost."""
    most = CHEAP_RATIO * min(float(cost[i]) for i in nodes)
    return [i for i in nodes if cost[i] <= most]
