"""The site of a request: queue + (transfer or recompute) + distance, for each site. Pure.

Sites are nodes with a fast network between them. The cost of a site is that of the best of its nodes by Algorithm 1
(sched/placement/costs.py), and its distance. The prefill and the decode node of a request are of one site,
so its KV crosses no slow link; only its prompt and its tokens do, and they take the distance: one round trip. A site
without a node of some role takes no request. The acceptor's own site wins among equals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sched.cost import TransferModel
from sched.placement.central import prompts_s
from sched.placement.costs import prefill_costs
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View


@dataclass(frozen=True, slots=True)
class SiteCost:
    """What one site offers for a request, seconds. Infinite: it cannot take the request."""

    site: str
    ttft_s: float
    distance_s: float

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.distance_s


def site_cost(
    now: float, demand: Demand, view: View, matched: Vector, site: str, distance_s: float, threshold: float = 1.5
) -> SiteCost:
    """The TTFT on the node of `view` that Algorithm 1 would choose. All are of one site; `demand`: with what its pool
    has."""
    if not len(view) or not (view.closed_decode < np.inf).any():
        return SiteCost(site, math.inf, distance_s)
    costs = prefill_costs(now, demand, view, matched, threshold)
    return SiteCost(site, float(costs.ttft_s[prompts_s(costs).argmin()]), distance_s)


def nearest(offers: Sequence[SiteCost], own: str) -> SiteCost | None:
    """The site with the least cost; the own one among equals. None if none can take the request."""
    able = [offer for offer in offers if offer.total_s < math.inf]
    return min(able, key=lambda offer: (offer.total_s, offer.site != own, offer.site), default=None)


def by_site(sites: Iterable[str]) -> dict[str, npt.NDArray[np.intp]]:
    """Indices of the nodes of each site, ascending. sites: of every node."""
    found: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        found.setdefault(site, []).append(i)
    return {site: np.array(indices, dtype=np.intp) for site, indices in found.items()}


def far_saves_s(compute_s: float, way: TransferModel, nbytes: float, wait_s: float) -> float:
    """Seconds that a fetch of `nbytes` from another site saves against `compute_s`, the time to compute the tokens; if
    not above zero, compute them. way: of this link, latency and bandwidth; wait_s: until the budget lets the last byte
    cross."""
    return compute_s - wait_s - way.estimate(int(nbytes))
