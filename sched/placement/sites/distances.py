"""Round trips from one node to other sites. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

WINDOW_S = 30.0
"""The distance of a site is the least round trip of this time: queues make others longer, nothing makes one shorter."""

MEASURE_S = 10.0
"""A site without a round trip for this long is asked again."""


class Distances:
    """Round trips from one node to other sites. The own site has distance 0."""

    def __init__(self, own: str) -> None:
        self.own = own
        self._trips: dict[str, deque[tuple[float, float]]] = {}  # (time, seconds), seconds ascending

    def observe(self, now: float, site: str, seconds: float) -> None:
        """A question to a node of `site` was answered after `seconds`."""
        if site == self.own:
            return
        trips = self._trips.setdefault(site, deque())
        while trips and trips[-1][1] >= seconds:  # newer and shorter: the older ones never count again
            trips.pop()
        trips.append((now, seconds))
        self._drop_old(now, trips)

    def of(self, now: float, site: str) -> float:
        """Seconds; infinite for a site that was never measured. The last known one counts until there is another."""
        if site == self.own:
            return 0.0
        trips = self._trips.get(site)
        if not trips:
            return math.inf
        self._drop_old(now, trips)
        return trips[0][1]

    def stale(self, now: float, site: str) -> bool:
        """Whether the site should be asked for a new round trip."""
        trips = self._trips.get(site)
        return site != self.own and (not trips or now - trips[-1][0] >= MEASURE_S)

    def keep(self, sites: Mapping[str, object]) -> None:
        """Forget the sites that are not among these: they may return by another way."""
        self._trips = {site: trips for site, trips in self._trips.items() if site in sites}

    @staticmethod
    def _drop_old(now: float, trips: deque[tuple[float, float]]) -> None:
        while len(trips) > 1 and now - trips[0][0] > WINDOW_S:
            trips.popleft()
