"""Reports the bandwidth of this node's rails to acceptors and to the prefix loader. They compare moving KV with
computing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import harmonic_mean
from typing import Protocol

from cache.block import BlockKey
from engine.handoff.messages import Rates
from net.transfer.engine import TransferEngine

REFRESH_INTERVAL_S = 0.5
"""Minimum time between two reads of the rates, which the rails update every MiB."""

UNEVEN_RATE_RATIO = 1.5
"""If the fastest rail is at least this much faster than the slowest, the estimate considers which nodes hold the
blocks."""

MAX_SAMPLED_KEYS = 16
"""Maximum number of a prompt's keys whose homes are considered: all keys of a long prompt would take longer than a
probe."""


class Converts(Protocol):
    """See engine.handoff.converting.Converter."""

    @property
    def bytes_per_s(self) -> float: ...


class Rounds(Protocol):
    """See engine.pooled.rounding.Rounding."""

    def kv_rates(self, rates: Mapping[str, float]) -> dict[str, float]: ...


class RailNews:
    """Rates of one node's transfer engine; `homes(key)`: nodes that hold the block if the pool has it. `rounding`:
    decides which blocks of the pool are rounded; they come at the rate of exact ones that takes as long."""

    def __init__(
        self,
        transfer: TransferEngine,
        homes: Callable[[BlockKey], Sequence[str]] = lambda key: (),
        converter: Converts | None = None,
        rounding: Rounds | None = None,
    ) -> None:
        self._transfer, self._homes, self._converter, self._rounding = transfer, homes, converter, rounding
        self._rates: dict[str, float] = {}
        self._pool_rates: dict[str, float] = {}
        self._mean = 0.0
        self._uneven = False
        self._looked_at = float("-inf")

    def tell(self, peers: Iterable[str], keys: Sequence[BlockKey]) -> Rates:
        """Rates in bytes/s: for reading `keys` from the pool (0 = not measured yet), and to each of `peers` that has a
        measurement."""
        self._look()
        known = {peer: rate for peer in peers if (rate := self._rates.get(peer)) is not None}
        converts = 0.0 if self._converter is None else self._converter.bytes_per_s
        return Rates(self._from_homes(keys), known, converts)

    def fetch_s(self, keys: Sequence[BlockKey], nbytes: int) -> float:
        """Minimum seconds to read `nbytes` of these blocks from the pool; 0 = not known."""
        self._look()
        rate = self._from_homes(keys)
        return nbytes / rate if rate else 0.0

    def from_node_s(self, node: str, nbytes: int) -> float:
        """Minimum seconds to read `nbytes` from one node; 0 = not known."""
        self._look()
        rate = self._rates.get(node, 0.0)
        return nbytes / rate if rate > 0 else 0.0

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= REFRESH_INTERVAL_S:
            self._looked_at, self._rates = now, self._transfer.bandwidths()
            self._pool_rates = self._rates if self._rounding is None else self._rounding.kv_rates(self._rates)
            rates = [rate for rate in self._pool_rates.values() if rate > 0]
            self._mean = harmonic_mean(rates) if rates else 0.0
            self._uneven = bool(rates) and max(rates) >= UNEVEN_RATE_RATIO * min(rates)

    def _from_homes(self, keys: Sequence[BlockKey]) -> float:
        """A fetch ends when the slowest home has sent its part, so the rates are averaged harmonically. The estimate
        assumes the fastest home of each block (cache/homes/routing.py); this node's own blocks use no rail."""
        if not self._uneven or not keys:
            return self._mean
        best = (
            max((self._pool_rates.get(home, 0.0) for home in self._homes(key)), default=0.0)
            for key in keys[:: -(-len(keys) // MAX_SAMPLED_KEYS)]
        )
        known = [rate for rate in best if rate > 0]
        return harmonic_mean(known) if known else self._mean
