"""NICs shared by flows: each flow runs at the smaller of its fair shares at both ends.

Rates change when a flow begins or ends at one of its NICs; only the flows of these NICs are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lab.simulator.models.loop import Loop
from sched.placement.links import Place

HANDOVER, FETCH, PUBLISH = range(3)
"""Ranks of flows by their deadlines, the most urgent first: KV for a decode node that waits, a prefix for a prompt that
waits, new blocks on their way to the pool. Here all ranks are alike; see lab/simulator/fabric/."""


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
        self.places: dict[str, Place] = {}  # of the nodes, in a network that has distances
        self._loop = loop
        self._sending: dict[str, dict[Flow, None]] = {}
        self._receiving: dict[str, dict[Flow, None]] = {}

    def send(self, source: str, target: str, nbytes: float, done: Callable[[], None], rank: int = PUBLISH) -> None:
        """`done` is called when the last byte has arrived."""
        self.scatter(source, {target: nbytes}, done)

    def scatter(self, source: str, to: Mapping[str, float], done: Callable[[], None], rank: int = PUBLISH) -> None:
        """`send` to several targets, in order; `done` is called for each. Their rates are computed once."""
        flows = [flow for target, nbytes in to.items() if (flow := self._begun(source, target, nbytes, done))]
        if not flows:
            return
        own, sent = self._sending[source], self.speed(source) / len(self._sending[source])
        order: dict[Flow, None] = {}
        for flow in flows[:-1]:
            there = self._receiving[flow.target]
            if self.speed(flow.target) / len(there) <= sent:
                order.update((other, None) for other in there if other.source == source)
            order.update((other, None) for other in there if other.source != source)
        self._share({**order, **own, **self._receiving[flows[-1].target]})

    def gather(self, parts: Mapping[str, float], target: str, done: Callable[[], None], rank: int = PUBLISH) -> None:
        """`send` from several sources, in order; `done` is called for each. Their rates are computed once."""
        flows = [flow for source, nbytes in parts.items() if (flow := self._begun(source, target, nbytes, done))]
        if not flows:
            return
        own, received = self._receiving[target], self.speed(target) / len(self._receiving[target])
        order: dict[Flow, None] = {}
        for flow in flows[:-1]:
            there = self._sending[flow.source]
            bound = self.speed(flow.source) / len(there) <= received
            order.update((other, None) for other in there if bound or other.target != target)
        self._share({**order, **self._sending[flows[-1].source], **own})

    def _begun(self, source: str, target: str, nbytes: float, done: Callable[[], None]) -> Flow | None:
        """A flow without a rate; None if there is nothing to move."""
        if source == target or nbytes <= 0:
            self._loop.after(0.0, done)
            return None
        self.bytes_moved += nbytes
        flow = Flow(source, target, nbytes, self._loop.now, done)
        self._sending.setdefault(source, {})[flow] = None
        self._receiving.setdefault(target, {})[flow] = None
        return flow

    def use(self) -> dict[str, tuple[float, float]]:
        """Node -> the shares of its NIC that received and sent of late; only in a network that has distances."""
        return {}

    def without_nic(self, source: str, target: str) -> float:
        """Bytes/s between two nodes of one host; 0 if their bytes cross NICs."""
        return 0.0

    def speed(self, node: str) -> float:
        """Present bytes/s of the node's NIC."""
        return self.bytes_s / self.slowness.get(node, 1.0)

    def _share(self, flows: Iterable[Flow]) -> None:
        """Give these their present rates. Flows that end at the same time end in the order in which their rates last
        changed: for several that begin at once, the order is that of beginning one after the other."""
        sending, receiving, now = self._sending, self._receiving, self._loop.now
        at, end, latency_s = self._loop.at, self._end, self.latency_s
        speed = self.speed if self.slowness else lambda node: self.bytes_s
        for flow in flows:
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
        self._share({**self._sending[flow.source], **self._receiving[flow.target]})
        flow.done()
