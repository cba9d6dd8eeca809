"""Flows over the links of the tree: max-min fair shares, or the most urgent flows first.

Max-min: the link with the least capacity per flow fixes the rate of its flows; the others share what is left, and so on
(Bertsekas and Gallager, Data Networks, section 6.5.2). With `ordered`, the flows of one rank are given their rates
before those of the next rank get what is left: the order of MFS (arXiv 2603.17456), with ranks in place of measured
laxity. All changes of one moment lead to one computation of rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from lab.simulator.fabric.tree import HOST_BYTES_S, FatTree, Link, path
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import PUBLISH, Network
from sched.placement.links import Place

DONE_BYTES = 0.5
"""A flow with less than this left has ended: floats of a long run are no more exact."""


LOOK_S = 0.5
"""Least time between two looks at the NICs: REFRESH_S of engine/node/resource_use.py."""


@dataclass(slots=True, eq=False)
class TreeFlow:
    links: tuple[Link, ...]
    left: float  # bytes
    rank: int
    done: Callable[[], None]
    rate: float = 0.0
    unseen: float = field(init=False)  # bytes that had not moved at the last look at the NICs

    def __post_init__(self) -> None:
        self.unseen = self.left


class TreeNetwork(Network):
    """Full duplex, as the network of one switch."""

    def __init__(
        self, loop: Loop, bytes_s: float, latency_s: float, tree: FatTree, places: dict[str, Place], ordered: bool
    ) -> None:
        """bytes_s: of a NIC. places: (pod, rack, host) of every node. ordered: flows of a smaller rank go first."""
        super().__init__(loop, bytes_s, latency_s)
        self.places = places
        self._tree, self._ordered = tree, ordered
        self._flows: dict[TreeFlow, None] = {}
        self._since, self._pending, self._version = 0.0, False, 0
        self._ended: dict[Link, float] = {}  # bytes of flows that have ended since the last look at the NICs
        self._use = dict.fromkeys(places, (0.0, 0.0))
        self._looked_at = -inf

    def send(self, source: str, target: str, nbytes: float, done: Callable[[], None], rank: int = PUBLISH) -> None:
        if source == target or nbytes <= 0:
            self._loop.after(0.0, done)
            return
        self.bytes_moved += nbytes
        self._flows[TreeFlow(path(source, target, self.places), nbytes, rank, done)] = None
        if not self._pending:
            self._pending = True
            self._loop.after(0.0, self._settle)

    def scatter(self, source: str, to: Mapping[str, float], done: Callable[[], None], rank: int = PUBLISH) -> None:
        for target, nbytes in to.items():
            self.send(source, target, nbytes, done, rank)

    def gather(self, parts: Mapping[str, float], target: str, done: Callable[[], None], rank: int = PUBLISH) -> None:
        for source, nbytes in parts.items():
            self.send(source, target, nbytes, done, rank)

    def use(self) -> dict[str, tuple[float, float]]:
        """Node -> the shares of its NIC's speed, received and sent, as a node measures them (net/metrics/nic_use.py):
        means since the last look, which was at least LOOK_S ago; else those of that look. 0 at the first one."""
        now = self._loop.now
        passed = now - self._looked_at
        if passed < LOOK_S:
            return self._use
        moved, self._ended, self._looked_at = self._ended, {}, now
        for flow in self._flows:
            left = max(0.0, flow.left - flow.rate * (now - self._since))
            _count(moved, flow, flow.unseen - left)
            flow.unseen = left
        if passed < inf:
            self._use = {node: self._shares(node, moved, passed) for node in self.places}
        return self._use

    def _shares(self, node: str, moved: Mapping[Link, float], seconds: float) -> tuple[float, float]:
        most = self.speed(node) * seconds  # a NIC that has become slow has moved more
        received, sent = (moved.get((f"node {node}", way), 0.0) for way in ("down", "up"))
        return min(1.0, received / most), min(1.0, sent / most)

    def without_nic(self, source: str, target: str) -> float:
        return HOST_BYTES_S if self.places[source] == self.places[target] else 0.0

    def _due(self, version: int) -> None:
        if version == self._version:
            self._settle()

    def _settle(self) -> None:
        """End the flows that have moved all their bytes, and give the others their present rates."""
        self._pending = False
        self._version += 1
        now = self._loop.now
        elapsed, self._since = now - self._since, now
        for flow in self._flows:
            flow.left -= flow.rate * elapsed
        for flow in [flow for flow in self._flows if flow.left < DONE_BYTES]:
            del self._flows[flow]
            _count(self._ended, flow, flow.unseen)
            self._loop.after(self.latency_s, flow.done)
        if not self._flows:
            return
        self._divide()
        next_s = min(flow.left / flow.rate for flow in self._flows if flow.rate > 0)
        self._loop.after(next_s, self._due, self._version)

    def _divide(self) -> None:
        left = {link: self._capacity(link) for flow in self._flows for link in flow.links}
        ranks = sorted({flow.rank for flow in self._flows}) if self._ordered else [None]
        for rank in ranks:
            fill([flow for flow in self._flows if rank is None or flow.rank == rank], left)

    def _capacity(self, link: Link) -> float:
        kind, _, node = link[0].partition(" ")
        return self.speed(node) if kind == "node" else self._tree.capacity(link, self.bytes_s)


def _count(moved: dict[Link, float], flow: TreeFlow, nbytes: float) -> None:
    """Add them to the bytes of the NICs at both ends."""
    for link in (flow.links[0], flow.links[-1]):
        moved[link] = moved.get(link, 0.0) + nbytes


def fill(flows: list[TreeFlow], left: dict[Link, float]) -> None:
    """Give these flows their max-min fair rates of what is `left` of each link, and take them from it."""
    users: dict[Link, list[TreeFlow]] = {}
    for flow in flows:
        flow.rate = -1.0
        for link in flow.links:
            users.setdefault(link, []).append(flow)
    counts = {link: len(on) for link, on in users.items()}
    while counts:
        tightest = min(counts, key=lambda link: left[link] / counts[link])
        share = max(0.0, left[tightest] / counts[tightest])
        for flow in users[tightest]:
            if flow.rate < 0:
                flow.rate = share
                for link in flow.links:
                    left[link] = max(0.0, left[link] - share)
                    counts[link] -= 1
                    if not counts[link]:
                        del counts[link]
