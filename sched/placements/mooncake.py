"""Algorithm 1 without a centre: gossip shortlists, fresh load words decide.

The node that looks best in gossiped state looks best to every acceptor until the next update, and all send there: the
burst per node grows with the cluster (reference/scheduling.md section 5, "stale argmin"). So of the K cheapest nodes,
as many as requests have probably been placed since the records were written, a few are drawn, and they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

from sched.placements.central import CentralGreedy
from sched.placements.costs import ranking
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.view import View

DRAWN = 3
"""Nodes drawn of the K cheapest, beside the best cache holder and one of all."""

SMALL = 16
"""Up to so many nodes of a role the cheapest are asked, FEW or as many as the state is old: drawing would only miss the
best."""

FEW = 4

TRIES = 2 * DRAWN
"""Draws of a decode node before all are looked at: enough where most have room."""

INFINITE = math.inf

Cheapest = Callable[[float, Demand, View, Vector, int], tuple[list[int], int | None] | None]
"""(now, demand, view, matched, width): at most `width` nodes of finite `ranking`, the cheapest first, and the node with
the longest prefix if any has one. None: numpy shall do it."""


def width_of(view: View) -> int:
    """As many nodes as have probably been chosen since the records were written."""
    return max(DRAWN, 1 + math.ceil(view.expected_arrivals))


class MooncakePlacement(CentralGreedy):
    """A random shortlist as wide as the state is old; then the paper's choice among those that answered."""

    asks_everybody = False
    cheapest: Cheapest | None = None  # a compiled one, of whoever makes the policy (engine/serving/cheapest.py)

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        width = width_of(view)
        if self.cheapest is not None and not (self.fetches and demand.pool_tokens):
            most = max(FEW, width) if len(view) <= SMALL else width
            found = self.cheapest(now, demand, view, matched, most)
            if found is not None:
                return self._of_cheapest(demand, view, width, *found)
        chosen = self._prefills(ranking(now, demand, view, matched, self.threshold, self.fetches), view, width)
        if not chosen:
            return ()
        if matched is not view.none and matched.item(holder := int(matched.argmax())) > 0 and view.prefills[holder]:
            chosen.append(holder)
        chosen += self._decodes(demand, view, width)
        return list(dict.fromkeys(chosen))

    def _of_cheapest(
        self, demand: Demand, view: View, width: int, cheapest: list[int], holder: int | None
    ) -> Sequence[int]:
        """`shortlist` when the cheapest nodes are known."""
        if not cheapest:
            return ()
        chosen = cheapest
        if len(view) > SMALL:
            chosen = self._some(cheapest)
            able = view.takers or cheapest
            other = able[int(self.rng.random() * len(able))]
            if view.open_at.item(other) < INFINITE and not view.obstacle(other, demand.num_tokens, demand.block_size):
                chosen.append(other)
        if holder is not None and view.prefills[holder]:
            chosen.append(holder)
        chosen += self._decodes(demand, view, width)
        return list(dict.fromkeys(chosen))

    def _prefills(self, rank: Vector, view: View, width: int) -> list[int]:
        """The cheapest first when there are few; nodes that cannot take it never."""
        if len(rank) <= SMALL:
            drawn = rank.argsort(kind="stable")[: max(FEW, width)].tolist()
        elif not (able := view.takers):
            return []
        else:
            cheapest = rank.argpartition(width)[:width].tolist() if width < len(able) else able
            drawn = self._some(cheapest)
            drawn.append(able[int(self.rng.random() * len(able))])
        rank_of = rank.item
        return [i for i in drawn if rank_of(i) < INFINITE]

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
