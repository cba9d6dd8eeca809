"""Which blocks of the pool are rounded to four bits (--pool-dtype int4-auto): those whose home is behind a slow link.

A block has one form in the pool, chosen when it is put. Who reads it later waits for

    exact     1 / goodput                             seconds per byte of KV, with the lossless coder if the link has it
    rounded   ratio / rate of the wire + 1 / decode

with the measured rates of the link between this node and the home. Rounding costs precision, so it must save a quarter
of that time (net/codec/paying.py). A home without a measured link, this node among them, counts as one behind the mean
of the others: its readers are other nodes. A link that nobody has measured rounds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, harmonic_mean
from typing import Protocol

from cache.block import BlockKey
from net.codec.paying import rounding_pays

REFRESH_INTERVAL_S = 0.5


class Links(Protocol):
    """See net.transfer.engine.TransferEngine."""

    def bandwidths(self) -> dict[str, float]: ...

    def share(self, peer_id: str) -> float: ...


class Rounding:
    """Of the blocks that this node puts. `homes(key)`: the nodes that will keep the block."""

    def __init__(
        self,
        links: Links,
        homes: Callable[[BlockKey], Sequence[str]],
        ratio: float,
        decode: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ratio: bytes of a rounded block for each of an exact one. decode: bytes of exact KV per second."""
        self._links, self._homes, self._clock = links, homes, clock
        self._ratio, self._decode = ratio, decode
        self._by_peer: dict[str, bool] = {}
        self._elsewhere = False
        self._looked_at = float("-inf")

    def pays(self, key: BlockKey) -> bool:
        """Whether this block should be put in four bits: at each of its homes that pays."""
        if (now := self._clock()) - self._looked_at >= REFRESH_INTERVAL_S:
            self._looked_at = now
            self._look()
        homes = self._homes(key)
        return bool(homes) and all(self._by_peer.get(home, self._elsewhere) for home in homes)

    def kv_rates(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Bytes of exact KV per second from the pool, by home, for these measured rates of links."""
        return {peer: self._kv_rate(rate, self._links.share(peer)) for peer, rate in rates.items()}

    def _look(self) -> None:
        rates = {peer: rate for peer, rate in self._links.bandwidths().items() if rate > 0}
        shares = {peer: self._links.share(peer) for peer in rates}
        self._by_peer = {peer: self._pays(rate, shares[peer]) for peer, rate in rates.items()}
        self._elsewhere = bool(rates) and self._pays(harmonic_mean(list(rates.values())), fmean(shares.values()))

    def _pays(self, rate: float, share: float) -> bool:
        return rounding_pays(rate, share, self._ratio, self._decode)

    def _kv_rate(self, rate: float, share: float) -> float:
        if rate <= 0 or not self._pays(rate, share):
            return rate
        return 1 / (self._ratio / (rate * share) + 1 / self._decode)
