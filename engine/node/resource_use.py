"""How full the tiers of this node are and how busy its network is. This is the part of its record that the engine
does not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from net.metrics.nic_use import NicUse
from sched.gossip.record import NodeRecord

REFRESH_S = 0.5  # between two measurements


@dataclass(frozen=True, slots=True)
class Use:
    """Used fractions of the capacity."""

    dram_fill: float = 0.0
    ssd_fill: float = 0.0
    nic_in: float = 0.0
    nic_out: float = 0.0


class NodeUse:
    """`tiers()`: cache.tiers.local_store.LocalStore.stats; empty on a node without a share of the store."""

    def __init__(
        self,
        tiers: Callable[[], Mapping[str, Mapping[str, Any]]],
        nics: NicUse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers, self._nics, self._clock = tiers, nics or NicUse(), clock
        self._use, self._looked_at = Use(), float("-inf")

    def __call__(self) -> Use:
        """The last measurement, at most REFRESH_S old."""
        now = self._clock()
        if now - self._looked_at >= REFRESH_S:
            self._looked_at = now
            tiers, (received, sent) = self._tiers(), self._nics.look(now)
            self._use = Use(_fill(tiers.get("dram")), _fill(tiers.get("ssd")), received, sent)
        return self._use

    def onto(self, record: NodeRecord) -> NodeRecord:
        """The record with these fractions filled in."""
        use = self()
        return replace(record, dram_fill=use.dram_fill, ssd_fill=use.ssd_fill, nic_in=use.nic_in, nic_out=use.nic_out)


def _fill(tier: Mapping[str, Any] | None) -> float:
    return tier["blocks"] / tier["capacity"] if tier and tier["capacity"] else 0.0
