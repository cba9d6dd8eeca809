"""How far the clocks of other nodes are from this one's, read off calls and their answers. Pure.

A node that answered 'my clock says t' between `sent` and `received` of our clock is off by
t - (sent + received) / 2, at most half the round trip wrong. Nodes of one host share a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds to subtract from the node's times, and how wrong that may be."""

    offset_s: float
    error_s: float


class Clocks:
    """The best estimate per node. Drift is small: an estimate is replaced by one with a round trip as short, and
    doubts about an old one grow by `drift`. One that contradicts it replaces it in any case: a clock was set."""

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
