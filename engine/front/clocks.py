"""Estimates the clock offsets of other nodes from calls and their answers. Pure.

If a node reports clock time t between `sent` and `received` of our clock, its offset is t - (sent + received) / 2, with
an error of at most half the round trip. Nodes on one host share a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds to subtract from the node's times, and the maximum error."""

    offset_s: float
    error_s: float


class Clocks:
    """The best estimate per node. A new estimate replaces the old one if its round trip is as short; the error of the
    old one grows by `drift`. A new estimate that contradicts the old one always replaces it: someone set a clock."""

    def __init__(self, drift: float = 1e-4) -> None:
        """drift: seconds of error per second of age."""
        self._drift = drift
        self._offsets: dict[str, tuple[Offset, float]] = {}

    def observe(self, node: str, sent: float, received: float, theirs: float, same_host: bool) -> None:
        """Times in unix seconds."""
        new = Offset(0.0, 0.0) if same_host else Offset(theirs - (sent + received) / 2, (received - sent) / 2)
        old = self._offsets.get(node)
        if old is not None:
            doubt_s = old[0].error_s + self._drift * abs(received - old[1])
            stepped = abs(new.offset_s - old[0].offset_s) > doubt_s + new.error_s
            if new.error_s > doubt_s and not stepped:
                return
        self._offsets[node] = new, received

    def of(self, nodes: Iterable[str]) -> dict[str, Any]:
        """JSON-ready, of those nodes that are known."""
        known = {node: self._offsets[node][0] for node in nodes if node in self._offsets}
        return {node: {"offset_s": one.offset_s, "error_s": one.error_s} for node, one in known.items()}
