"""The acceptors' estimates of transfers: exact, learned from transfers, or learned and reported by the rails.

Nodes report the rates of their rails with an error, like rates measured over short transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from sched.cost import TransferModel
from sched.placement.links import Lines, Paths, Place, UniformLinks
from sched.placement.measured_links import MeasuredLinks

KINDS = ("exact", "learnt", "rails")

RAIL_ERROR = 0.1
"""Standard deviation of the logarithm of a reported rate."""


class SimLinks:
    """`exact` knows the nominal speed of the NICs, but not that one has become slow."""

    def __init__(self, kind: str, network: Network, loop: Loop, seed: int, places: Mapping[str, Place]) -> None:
        """places: of the nodes that tell theirs. Raises ValueError for a kind that is not among KINDS."""
        if kind not in KINDS:
            raise ValueError(f"--links must be one of {', '.join(KINDS)}, got {kind!r}")
        self._kind, self._network = kind, network
        line = TransferModel(network.latency_s, network.bytes_s)
        self._exact = UniformLinks(line, line)
        self._lines: dict[int, Lines] = {}  # number of nodes -> lines
        self._measured = MeasuredLinks()
        self._measured.places = places
        self._loop, self._rng = loop, Random(f"rails {seed}")
        self._asked_at = float("-inf")

    @property
    def places(self) -> Mapping[str, Place]:
        """Of the nodes that tell theirs."""
        return self._measured.places

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return self._alike(nodes) if self._kind == "exact" else self._measured.fetch(nodes)

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        if self._kind == "exact":
            return self._alike(nodes)
        return self._measured.handover(source, nodes)

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return self._exact.fetch_each(nodes) if self._kind == "exact" else self._measured.fetch_each(nodes)

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        if self._kind == "exact":
            return self._exact.fetch_each(nodes)
        return self._measured.handover_each(source, nodes)

    def _alike(self, nodes: Sequence[str]) -> Lines:
        if len(nodes) not in self._lines:
            self._lines[len(nodes)] = self._exact.fetch(nodes)
        return self._lines[len(nodes)]

    def use(self) -> dict[str, tuple[float, float]]:
        """See Network."""
        return self._network.use()

    def asked(self, nodes: Sequence[str], every_s: float = 0.0) -> bool:
        """Probed nodes answer, and report the rates of their rails; all nodes report only their own, every
        `every_s`. False if that time has not passed."""
        if every_s and self._loop.now < self._asked_at + every_s:
            return False
        if every_s:
            self._asked_at = self._loop.now
        if self._kind != "rails":
            return True
        speeds = {node: self._network.speed(node) for node in nodes}
        peers = {} if every_s else speeds
        for node, rate in speeds.items():
            error = self._rng.lognormvariate(0.0, RAIL_ERROR)
            speed = rate * error
            to = {peer: speed if speed <= theirs else theirs for peer, theirs in peers.items()}
            to |= {peer: error * inside for peer in peers if (inside := self._network.without_nic(node, peer))}
            self._measured.reported(node, speed, to)
        return True

    def fetched(self, node: str, nbytes: float, seconds: float) -> None:
        if self._kind != "exact":
            self._measured.fetched(node, round(nbytes), seconds)

    def handed_over(self, source: str, node: str, nbytes: float, seconds: float) -> None:
        if self._kind != "exact":
            self._measured.handed_over(source, node, round(nbytes), seconds)
