"""Algorithm 1 without a centre: gossip shortlists, fresh load words decide.

The node that looks best in gossiped state looks best to every acceptor until the next update, and all send there: the
burst per node grows with the cluster (reference/scheduling.md section 5, "stale argmin"). So of the K cheapest nodes,
as many as requests have probably been placed since the records were written, a few are drawn, and they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from sched.placement.central import CentralGreedy
from sched.placement.costs import ranking
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View

DRAWN = 3
"""Nodes drawn of the K cheapest, beside the best cache holder and one of all."""

SMALL = 16
"""Up to so many nodes of a role the cheapest are asked, FEW or as many as the state is old: drawing would only miss the
best."""

FEW = 4

TRIES = 2 * DRAWN
"""Draws of a decode node before all are looked at: enough where most have room."""

INFINITE = math.inf

Compiled = Callable[[float, Demand, View, Vector, int, float], list[int] | None]
"""(now, demand, view, matched, width, seed): the shortlist when no pool is counted, drawn with `seed` in [0, 1). None:
it is left to numpy."""


def width_of(view: View) -> int:
    """As many nodes as have probably been chosen since the records were written."""
    return max(DRAWN, 1 + math.ceil(view.expected_arrivals))


def _cheapest(rank: Vector, most: int) -> list[int]:
    """At most so many nodes of finite rank, the cheapest first and of equals the first."""
    if most < len(rank):
        bound = rank.item(int(rank.argpartition(most - 1)[most - 1]))
        nodes: list[int] = np.flatnonzero(rank <= bound).tolist()
    else:
        nodes = list(range(len(rank)))
    rank_of = rank.item
    return [i for i in sorted(nodes, key=rank_of) if rank_of(i) < INFINITE][:most]


class MooncakePlacement(CentralGreedy):
    """A random shortlist as wide as the state is old; then the paper's choice among those that answered."""

    asks_everybody = False
    compiled: Compiled | None = None  # set by the maker of the policy (engine/front/cheapest.py)

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        width = width_of(view)
        if self.compiled is not None and not (self.fetches and demand.pool_tokens):
            found = self.compiled(now, demand, view, matched, width, self.rng.random())
            if found is not None:
                return found
        chosen = self._prefills(ranking(now, demand, view, matched, self.threshold, self.fetches), view, width)
        if not chosen:
            return ()
        if matched is not view.none and matched.item(holder := int(matched.argmax())) > 0 and view.prefills[holder]:
            chosen.append(holder)
        chosen += self._decodes(demand, view, width)
        return list(dict.fromkeys(chosen))

    def _prefills(self, rank: Vector, view: View, width: int) -> list[int]:
        """The cheapest first when there are few; nodes that cannot take it never."""
        if len(rank) <= SMALL:
            return _cheapest(rank, max(FEW, width))
        cheapest = _cheapest(rank, width)
        if not cheapest:
            return []
        drawn = self._some(cheapest)
        able = view.takers or cheapest
        other = able[int(self.rng.random() * len(able))]
        if rank.item(other) < INFINITE:
            drawn.append(other)
        return drawn

    def _decodes(self, demand: Demand, view: View, width: int) -> list[int]:
        """Of the fastest with room for this request; hand-over times count when they have answered."""
        order, need = view.decode_order, demand.num_blocks
        most = FEW if len(view) <= SMALL else min(width, len(order))
        if most > FEW and (drawn := self._roomy(order, most, need)):
            return drawn
        roomy = list(islice((i for i, free in order if free >= need), most))
        if not roomy:
            roomy = [i for i, _ in order[:most]]
        return roomy if len(roomy) <= FEW else self._some(roomy)

    def _roomy(self, order: list[tuple[int, float]], most: int, need: int) -> list[int]:
        """DRAWN of the first `most` with room for `need` blocks; empty when too few of them seem to have it: then
        whoever asks has to go through all."""
        random, drawn = self.rng.random, []
        for _ in range(TRIES):
            i, free = order[int(random() * most)]
            if free >= need:
                drawn.append(i)
                if len(drawn) == DRAWN:
                    return drawn
        return []

    def _some(self, nodes: list[int]) -> list[int]:
        """DRAWN draws, seldom twice the same: six times as fast as a sample, and twice as a loop over DRAWN."""
        random, size = self.rng.random, len(nodes)
        return [nodes[int(random() * size)], nodes[int(random() * size)], nodes[int(random() * size)]]
