"""SiteFinder: the site of a request, as its acceptor chooses it (sched/placement/sites/).

The acceptor knows the queues and the arenas of all sites from gossip, and the pool of its own site by asking it. The
distance of a site is the shortest round trip of the questions to its nodes; of a site without a recent one, one node
after the other is asked in the background, and it takes no request before one has answered. So a site is asked as soon
as it is there, and not only when a request comes. A site where nobody answered a question in time is silent: it was
probably cut off, which gossip finds out node by node. Until one of its nodes has answered, it takes only requests that
no other site can take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

from sched.membership.member import Member
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.sites.choice import SiteCost, by_site, nearest, site_cost
from sched.placement.sites.distances import Distances
from sched.placement.view import View

RETRY_S = 1.0  # between two background questions to a site


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, as its own site (`near`: with what the pool there has) and other sites (`far`) see it; `bound`: it may
    not leave its site."""

    near: Demand
    far: Demand
    bound: bool


class SiteFinder:
    """The finder of an acceptor at site `own`. `measure(member)` asks that node, and reports to `heard`."""

    def __init__(self, own: str, measure: Callable[[Member], None]) -> None:
        self.own = own
        self._measure = measure
        self._distances = Distances(own)
        self._asked: dict[str, tuple[float, int]] = {}  # site -> time of the last background question, their number
        self._silent: set[str] = set()

    def several(self, sites: Set[str]) -> bool:
        """Whether there are other ones than the own one among these."""
        return not sites <= {self.own}

    def heard(self, now: float, member: Member, round_trip_s: float) -> None:
        """The node has answered a question."""
        self._silent.discard(member.site)
        self._distances.observe(now, member.site, round_trip_s)

    def silent(self, site: str) -> None:
        """None of its nodes that were asked has answered in time; `unknown` asks others."""
        if site != self.own:
            self._silent.add(site)

    def keep(self, sites: Set[str]) -> None:
        """Forget what was known of other sites than these."""
        self._distances.keep(dict.fromkeys(sites))
        self._silent &= sites

    def choose(
        self,
        now: float,
        view: View,
        members: Sequence[Member],
        matched: Vector,
        wanted: Wanted,
        tried: Collection[str] = (),
    ) -> tuple[str, bool]:
        """(the site of the request, whether another one can take it, too); the own one if none can. members: in the
        order of the view; matched: leading tokens that each holds; tried: sites that did not answer this request."""
        sites = by_site(member.site for member in members)
        costs, silent = list[SiteCost](), list[SiteCost]()
        for site, indices in sites.items():
            if self._distances.stale(now, site):
                self._ask(now, site, [members[i] for i in indices])
            if site != self.own and (wanted.bound or site in tried):
                continue
            part = view.only(indices.tolist())
            held = part.none if matched is view.none else matched[indices]
            demand = wanted.near if site == self.own else wanted.far
            cost = site_cost(now, demand, part, held, site, self._distances.of(now, site))
            (silent if site in self._silent else costs).append(cost)
        best = nearest(costs, self.own) or nearest(silent, self.own)
        if best is None:
            return self.own, False
        return best.site, nearest([cost for cost in costs if cost is not best], self.own) is not None

    def unknown(self, now: float, members: Sequence[Member]) -> bool:
        """Whether the distance of a site was never measured, or a site is silent; then one of its nodes is asked.
        members: of all sites."""
        sites = by_site(member.site for member in members)
        unknown = [site for site in sites if site in self._silent or self._distances.of(now, site) == math.inf]
        for site in unknown:
            self._ask(now, site, [members[i] for i in sites[site]])
        return bool(unknown)

    def _ask(self, now: float, site: str, members: Sequence[Member]) -> None:
        """One of the site's members in turn, as some may not answer, at most once per RETRY_S."""
        asked_at, times = self._asked.get(site, (-math.inf, 0))
        if now - asked_at >= RETRY_S:
            self._asked[site] = now, times + 1
            self._measure(members[times % len(members)])
