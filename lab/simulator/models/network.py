"""NICs shared by flows: each flow runs at the smaller of its fair shares at both ends.

Rates change when a flow begins or ends at one of its NICs; only the flows of these NICs are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lab.simulator.models.loop import Loop


@dataclass(slots=True, eq=False)
class Flow:
    source: str
    target: str
    left: float  # bytes
    since: float
    done: Callable[[], None]
    rate: float = 0.0
    version: int = 0


class Network:
    """Full duplex: sending does not slow receiving."""

    def __init__(self, loop: Loop, bytes_s: float, latency_s: float) -> None:
        self.bytes_moved = 0.0
        self.bytes_s, self.latency_s = bytes_s, latency_s
        self.slowness: dict[str, float] = {}  # factor of NICs that have become slow
        self._loop = loop
        self._sending: dict[str, dict[Flow, None]] = {}
        self._receiving: dict[str, dict[Flow, None]] = {}

    def send(self, source: str, target: str, nbytes: float, done: Callable[[], None]) -> None:
        """`done` is called when the last byte has arrived."""
        self.send_all([(source, target, nbytes)], done)

    def send_all(self, transfers: Iterable[tuple[str, str, float]], done: Callable[[], None]) -> None:
        """Begin several transfers, (source, target, bytes), at once; `done` is called for each of them."""
        begun: list[Flow] = []
        for source, target, nbytes in transfers:
            if source == target or nbytes <= 0:
                self._loop.after(0.0, done)
                continue
            self.bytes_moved += nbytes
            flow = Flow(source, target, nbytes, self._loop.now, done)
            self._sending.setdefault(source, {})[flow] = None
            self._receiving.setdefault(target, {})[flow] = None
            begun.append(flow)
        if begun:
            self._share(begun)

    def speed(self, node: str) -> float:
        """Present bytes/s of the node's NIC."""
        return self.bytes_s / self.slowness.get(node, 1.0)

    def _share(self, changed: Sequence[Flow]) -> None:
        """Give the flows at the NICs of these their present rates."""
        sending, receiving, now = self._sending, self._receiving, self._loop.now
        at, end, latency_s = self._loop.at, self._end, self.latency_s
        speed = self.speed if self.slowness else lambda node: self.bytes_s
        touched: dict[Flow, None] = {}
        for source in dict.fromkeys([flow.source for flow in changed]):
            touched |= sending[source]
        for target in dict.fromkeys([flow.target for flow in changed]):
            touched |= receiving[target]
        for flow in touched:
            sent = speed(flow.source) / len(sending[flow.source])
            rate = min(sent, speed(flow.target) / len(receiving[flow.target]))
            if rate == flow.rate:
                continue
            left = flow.left = flow.left - flow.rate * (now - flow.since)
            flow.since, flow.rate = now, rate
            flow.version += 1
            at(now + ((left if left > 0.0 else 0.0) / rate + latency_s), end, flow, flow.version)

    def _end(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.version += 1
        del self._sending[flow.source][flow], self._receiving[flow.target][flow]
        flow.rate = 0.0
        self._share([flow])
        flow.done()
