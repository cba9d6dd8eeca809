"""Algorithm 1 without a centre: gossip makes a shortlist, and fresh load words decide.

The node that looks best in gossiped state looks best to every acceptor until the next update. All acceptors would send
their requests there, and the burst per node would grow with the cluster (reference/scheduling.md section 5, "stale
argmin"). So the acceptor takes the K cheapest nodes, where K is the number of requests that were probably placed since
the records were written. It draws a few of them at random and asks these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sched.admission import Limits
from sched.membership.member import Rng
from sched.placement.central import CentralGreedy, prompts_s
from sched.placement.costs import most_local_of, prefill_costs
from sched.placement.demand import Demand
from sched.placement.few import Finder
from sched.placement.links import Vector
from sched.placement.view import View

DRAWN_NODES = 3
"""Number of nodes drawn from the K cheapest. The acceptor also asks the best cache holder and one random node."""

SMALL_CLUSTER = 16
"""Up to this many nodes of a role, the acceptor asks the cheapest nodes without drawing, because a draw would only miss
the best ones."""

SHORTLIST_SIZE = 4
"""Least number of nodes on the shortlist of a small cluster; older state makes the shortlist longer."""

MAX_DRAWS = 2 * DRAWN_NODES
"""Number of draws for decode nodes before the policy looks at all nodes. It suffices while most nodes have room."""

INFINITE = math.inf


@dataclass(frozen=True)
class Compiled:
    """Compiled parts of the policy: engine/front/compiled/cheapest.py and engine/front/compiled/choose.py."""

    shortlist: Callable[[float, Demand, View, Vector, float], list[int] | None]
    """(now, demand, view, matched, seed): the shortlist without the pool, drawn with `seed` in [0, 1). None: numpy must
    compute it."""

    find: Finder


def width_of(view: View) -> int:
    """The number of nodes that were probably chosen since the records were written."""
    return max(DRAWN_NODES, 1 + math.ceil(view.expected_arrivals))


def ranking(now: float, demand: Demand, view: View, matched: Vector, threshold: float, fetch: bool = True) -> Vector:
    """`now` + `prompts_s(prefill_costs(...))`, for callers that only need the cheapest nodes: half the work, unless
    a part of the prefix is on SSD."""
    if fetch and demand.ssd_s:
        return now + prompts_s(prefill_costs(now, demand, view, matched, threshold))
    n, powers = float(demand.num_tokens), view.powers
    powers[1], powers[2] = n, n * n
    rank: Vector = powers.dot(view.prefill)
    scratch = np.empty(len(rank))
    if matched is not view.none:
        np.multiply(view.a2, matched, out=scratch)
        scratch += view.a1
        scratch *= matched
        rank -= scratch
    if fetch and demand.pool_tokens and (pooled := float(demand.pooled_tokens)):
        latency_s, per_token_s = view.fetch(demand.fetch_token_bytes)
        far = pooled - matched
        # Tokens of the pool beyond the node's own prefix: compare the fetch with a1 + a2 (pooled + own) s per token.
        np.add(matched, pooled, out=scratch)
        scratch *= view.a2
        scratch += view.a1
        scratch -= per_token_s
        scratch *= far
        scratch -= latency_s
        scratch[matched >= most_local_of(pooled, threshold)] = 0.0
        rank -= np.maximum(scratch, 0.0, out=scratch)
    np.multiply(rank, view.prompt_tolls(), out=scratch)
    rank += scratch
    rank += np.maximum(view.open_at, now, out=scratch)
    if view.least_blocks * demand.block_size <= n and (long := view.too_long(int(n), demand.block_size)) is not None:
        rank += long
    return rank


def _cheapest(rank: Vector, most: int) -> list[int]:
    """At most `most` nodes of finite rank, cheapest first; among equals, the first."""
    if most < len(rank):
        nodes = np.flatnonzero(rank <= rank.item(int(rank.argpartition(most - 1)[most - 1])))
    else:
        nodes = np.arange(len(rank))
    costs = rank[nodes]
    order = costs.argsort(kind="stable")
    found: list[int] = nodes[order[costs[order] < INFINITE]][:most].tolist()
    return found


class MooncakePlacement(CentralGreedy):
    """A random shortlist that grows with the age of the state, then the paper's choice among the answering nodes."""

    asks_everybody = False

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5, *, compiled: Compiled | None = None) -> None:
        """compiled: None = numpy computes everything."""
        super().__init__(limits, rng, threshold, None if compiled is None else compiled.find)
        self.compiled = compiled

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        if self.compiled is not None and not (demand.pool_tokens and self.fetches):
            found = self.compiled.shortlist(now, demand, view, matched, self.rng.random())
            if found is not None:
                return self._with_near(found, demand, view)
        width = width_of(view)
        chosen = self._prefills(ranking(now, demand, view, matched, self.threshold, self.fetches), view, width)
        if not chosen:
            return ()
        if matched is not view.none and matched.item(holder := int(matched.argmax())) > 0 and view.prefills[holder]:
            chosen.append(holder)
        chosen += self._decodes(demand, view, width)
        return self._with_near(list(dict.fromkeys(chosen)), demand, view)

    def _with_near(self, chosen: list[int], demand: Demand, view: View) -> list[int]:
        """And for each of its prefill nodes a decode node near it with room, where nodes tell their places: the draw
        of decode nodes does not know to which of these the prompt will go."""
        if not chosen or not view.near:
            return chosen
        near = [view.near_decode(i, demand.num_blocks, self.rng) for i in chosen if view.open_at[i] < INFINITE]
        return list(dict.fromkeys([*chosen, *(i for i in near if i is not None)]))

    def _prefills(self, rank: Vector, view: View, width: int) -> list[int]:
        """The cheapest nodes of a small cluster, otherwise a draw; never nodes that cannot take the request. A draw
        among all nodes needs no order."""
        if len(rank) <= SMALL_CLUSTER:
            return _cheapest(rank, max(SHORTLIST_SIZE, width))
        cheapest = _cheapest(rank, width) if width < len(rank) else np.flatnonzero(rank < INFINITE).tolist()
        if not cheapest:
            return []
        drawn = self._some(cheapest)
        able = view.takers or cheapest
        other = able[int(self.rng.random() * len(able))]
        if rank.item(other) < INFINITE:
            drawn.append(other)
        return drawn

    def _decodes(self, demand: Demand, view: View, width: int) -> list[int]:
        """Some of the fastest nodes with room for this request. Hand-over times count after they have answered."""
        order, need = view.decode_order, demand.num_blocks
        most = SHORTLIST_SIZE if len(view) <= SMALL_CLUSTER else min(width, len(order))
        if most > SHORTLIST_SIZE and (drawn := self._roomy(order, most, need)):
            return drawn
        roomy = list(islice((i for i, free in order if free >= need), most))
        if not roomy:
            roomy = [i for i, _ in order[:most]]
        return roomy if len(roomy) <= SHORTLIST_SIZE else self._some(roomy)

    def _roomy(self, order: list[tuple[int, float]], most: int, need: int) -> list[int]:
        """DRAWN_NODES of the first `most` nodes, with room for `need` blocks. Empty when too few seem to have room; the
        caller must then look at all nodes."""
        random, drawn = self.rng.random, []
        for _ in range(MAX_DRAWS):
            i, free = order[int(random() * most)]
            if free >= need:
                drawn.append(i)
                if len(drawn) == DRAWN_NODES:
                    return drawn
        return []

    def _some(self, nodes: list[int]) -> list[int]:
        """DRAWN_NODES draws, rarely the same node twice. 6x as fast as a sample, and 2x as fast as a loop."""
        random, size = self.rng.random, len(nodes)
        return [nodes[int(random() * size)], nodes[int(random() * size)], nodes[int(random() * size)]]
