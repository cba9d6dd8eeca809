"""What this node's rails give, as acceptors want to know it that weigh moving KV against computing it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from net.transfer import TransferEngine

KEPT_S = 0.5
"""Rails are looked at this often at most: they measure every MiB."""


class RailNews:
    """Of the transfer engine of one node."""

    def __init__(self, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._rates: dict[str, float] = {}
        self._mean = 0.0
        self._looked_at = float("-inf")

    def tell(self, peers: Iterable[str]) -> dict[str, Any]:
        """Bytes/s: the mean over all peers, which is what the pool's blocks come with (0 = nothing was measured yet),
        and to each of `peers` that it is known of."""
        now = time.monotonic()
        if now - self._looked_at >= KEPT_S:
            self._looked_at, self._rates = now, self._transfer.bandwidths()
            self._mean = fmean(self._rates.values()) if self._rates else 0.0
        known = {peer: rate for peer in peers if (rate := self._rates.get(peer)) is not None}
        return {"fetch_bytes_per_s": self._mean, "bytes_per_s": known}

    def fetch_s(self, nbytes: int) -> float:
        """Least seconds that so much takes from the pool, 0 = not known."""
        mean = self.tell(())["fetch_bytes_per_s"]
        return nbytes / mean if mean else 0.0
