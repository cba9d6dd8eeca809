"""Algorithm 1 without a centre: gossip shortlists, fresh load words decide.

The node that looks best in gossiped state looks best to every acceptor until the next update, and all send there: the
burst per node grows with the cluster (reference/scheduling.md section 5, "stale argmin"). So of the K cheapest nodes,
as many as requests have probably been placed since the records were written, a few are drawn, and they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sched.placements.central import CentralGreedy
from sched.placements.costs import decode_costs, prefill_costs
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.view import View

DRAWN = 3
"""Nodes drawn of the K cheapest, beside the best cache holder and one of all."""

SMALL = 16
"""Up to so many nodes of a role, the cheapest FEW are asked: drawing would only miss the best."""

FEW = 4


class MooncakePlacement(CentralGreedy):
    """A random shortlist as wide as the state is old; then the paper's choice among those that answered."""

    asks_everybody = False

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        costs = prefill_costs(now, demand, view, matched, self.threshold, self.fetches)
        chosen = dict.fromkeys(self._draw(costs.ttft_s, view.expected_arrivals))
        if not chosen:
            return ()
        if matched is not view.none and float(matched[holder := int(matched.argmax())]) > 0 and view.prefills[holder]:
            chosen[holder] = None
        targets = decode_costs(demand, view, costs, next(iter(chosen)))
        chosen |= dict.fromkeys(self._draw(targets.roomy_s(), view.expected_arrivals))
        return list(chosen)

    def _draw(self, column: Vector, expected_arrivals: float) -> list[int]:
        """The cheapest first when there are few; infinite ones never."""
        size = len(column)
        if size <= SMALL:
            order = np.argsort(column, kind="stable")[:FEW].tolist()
            return [i for i in order if column[i] < np.inf]
        k = min(size - 1, max(DRAWN, 1 + math.ceil(expected_arrivals)))
        cheapest = np.argpartition(column, k)[:k].tolist()
        drawn = [*self.rng.sample(cheapest, DRAWN), int(self.rng.random() * size)]
        return [i for i in drawn if column[i] < np.inf]
