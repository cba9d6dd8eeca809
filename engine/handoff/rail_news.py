"""What this node's rails give, as acceptors and the loader of prefixes want to know it that weigh moving KV against
computing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import harmonic_mean

from cache.block import BlockKey
from engine.handoff.messages import Rates
from net.transfer.engine import TransferEngine

KEPT_S = 0.5
"""Rails are looked at this often at most: they measure every MiB."""

UNEVEN = 1.5
"""From this ratio of the fastest to the slowest path on it matters whose blocks are wanted."""

SAMPLE = 16
"""Keys of a prompt whose homes are looked at then: all of a long one would take longer than a probe."""


class RailNews:
    """Of the transfer engine of one node; `homes(key)`: who has a block, if the pool has it."""

    def __init__(self, transfer: TransferEngine, homes: Callable[[BlockKey], Sequence[str]] = lambda key: ()) -> None:
        self._transfer, self._homes = transfer, homes
        self._rates: dict[str, float] = {}
        self._mean = 0.0
        self._uneven = False
        self._looked_at = float("-inf")

    def tell(self, peers: Iterable[str], keys: Sequence[BlockKey]) -> Rates:
        """Bytes/s: what blocks of the pool come with, those of `keys` if it depends on whose they are (0 = nothing was
        measured yet), and to each of `peers` that it is known of."""
        self._look()
        known = {peer: rate for peer in peers if (rate := self._rates.get(peer)) is not None}
        return Rates(self._from_homes(keys), known)

    def fetch_s(self, keys: Sequence[BlockKey], nbytes: int) -> float:
        """Least seconds that these blocks take from the pool, 0 = not known."""
        self._look()
        rate = self._from_homes(keys)
        return nbytes / rate if rate else 0.0

    def from_node_s(self, node: str, nbytes: int) -> float:
        """Least seconds that so many bytes take from one node, 0 = not known."""
        self._look()
        rate = self._rates.get(node, 0.0)
        return nbytes / rate if rate > 0 else 0.0

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= KEPT_S:
            self._looked_at, self._rates = now, self._transfer.bandwidths()
            rates = [rate for rate in self._rates.values() if rate > 0]
            self._mean = harmonic_mean(rates) if rates else 0.0
            self._uneven = bool(rates) and max(rates) >= UNEVEN * min(rates)

    def _from_homes(self, keys: Sequence[BlockKey]) -> float:
        """A fetch is over when the slowest home has sent its part, so rates are averaged as times. Of several homes of
        one block the fastest is asked (cache/homes/routing.py); this node's own blocks take no rail."""
        if not self._uneven or not keys:
            return self._mean
        best = (
            max((self._rates.get(home, 0.0) for home in self._homes(key)), default=0.0)
            for key in keys[:: -(-len(keys) // SAMPLE)]
        )
        known = [rate for rate in best if rate > 0]
        return harmonic_mean(known) if known else self._mean
