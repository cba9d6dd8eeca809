"""The nodes' knowledge of each other by the gossip of production: SWIM membership and cache digests, in virtual time.

Every node has a gossip core (sched/gossip/core.py) on a virtual network (lab/virtual/). Its cache tells the core's
cuckoo filter which blocks come and go; an acceptor asks the filters that have reached its own core, so what it knows is
late, has false positives, and counts a prefix in steps of a twelfth of the prompt (sched/placement/match.py). A crash
is found by probes, and spreads as news. Load records are not exchanged here: lab/simulator/placing.py has them.

The cores cost time whatever the load: on the machine of the first runs 10 ms of CPU per simulated second for 16 nodes,
70 ms for 64 and 220 ms for 256. An hour's trace takes half a minute longer with 16 nodes, which is more than the rest
of the simulation, and minutes longer with 64. So `Directory` of caches.py is the default: the fast stand-in, held
against this one by tests/lab/simulator/test_gossip_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from random import Random

import numpy as np
import numpy.typing as npt

from cache.block import KEY_BYTES
from lab.simulator.models.caches import Vector
from lab.virtual.cluster import GossipNode, VirtualCluster
from lab.virtual.network import Weather
from sched.membership.member import Status, presets
from sched.placement.match import Matcher

KINDS = ("fast", "real")
NEVER_S = 1e9
WATCH_S = 0.1
"""How often it is checked whether all nodes know of a crash."""


@dataclass(slots=True)
class Accuracy:
    """Answers of digests about single nodes against the truth at that time."""

    answers: int = 0
    above: int = 0  # more leading blocks than the node has: evicted since, or a false positive
    below: int = 0  # fewer: not told yet, or between two steps of the estimate

    def count(self, said: Vector, truth: Vector) -> None:
        self.answers += len(said)
        self.above += int(np.count_nonzero(said > truth))
        self.below += int(np.count_nonzero(said < truth))


class Gossip:
    """The cores of all nodes. Indices are those of `names`."""

    kind = "real"

    def __init__(
        self, clock: Callable[[], float], names: Sequence[str], cell_nodes: int, loss: float, seed: int
    ) -> None:
        """clock(): the time of the simulation; cell_nodes: nodes of a cell at most; loss: share of the packets."""
        self.accuracy = Accuracy()
        self._clock, self._names, self._rng = clock, list(names), Random(f"gossip {seed}")
        preset = replace(presets["lan"], state_period_s=NEVER_S, cell_period_s=NEVER_S, cell_nodes=cell_nodes)
        self._net = VirtualCluster(self._rng, Random, preset, Weather(loss=loss))
        self._nodes = [self._net.add(name) for name in self._names]
        self._net.acquaint()
        self._matchers = [self._matcher(node) for node in self._nodes]
        self._places: dict[int, tuple[list[str | None], npt.NDArray[np.intp]]] = {}
        self._keys: dict[int, int] = {}

    @staticmethod
    def _matcher(node: GossipNode) -> Matcher:
        return Matcher(lambda: node.core.digests.holders)

    def _now(self) -> None:
        """Let the network reach the present: nothing but these methods changes it in between."""
        if (late := self._clock() - self._net.now) > 0:
            self._net.run(late)

    def _key(self, block: int) -> int:
        """Filters use the bits of a key directly, so it must be a hash; ids of blocks count upwards."""
        if block not in self._keys:
            data = block.to_bytes(KEY_BYTES, "little")
            self._keys[block] = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
        return self._keys[block]

    # --- what nodes say

    def tell(self, now: float, node: int, block: int, present: bool) -> None:
        """The node's cache has added or dropped a block."""
        self._now()
        if self._nodes[node].up:
            own = self._nodes[node].core.digests.own
            (own.add if present else own.discard)(self._key(block))

    # --- what acceptors know

    def acceptor(self, before: int, among: Iterable[int]) -> int:
        """A node that is up takes the request; the one that took it `before` (-1: none), if it still is up."""
        self._now()
        if before >= 0 and self._nodes[before].up:
            return before
        up = [i for i in among if self._nodes[i].up]
        return self._rng.choice(up) if up else -1

    def depths(self, acceptor: int, blocks: Sequence[int]) -> Vector:
        """[nodes]: leading blocks that each node holds, as the acceptor's core knows."""
        holders = self._nodes[acceptor].core.digests.holders
        nodes, places = self._places.get(acceptor, ([], np.zeros(0, np.intp)))
        if nodes != holders.nodes:
            known = [holders.index(name) for name in self._names]
            places = np.array([-1 if at is None else at for at in known], np.intp)
            self._places[acceptor] = list(holders.nodes), places
        found = self._matchers[acceptor].depths(list(map(self._key, blocks)), 1, places)
        return np.zeros(len(self._names)) if found is None else found

    def absent(self, acceptor: int) -> tuple[list[int], list[int]]:
        """(nodes that the acceptor knows to be dead, those that it suspects)"""
        status = {member.node_id: member.status for member in self._nodes[acceptor].core.membership.alive()}
        dead = [i for i, name in enumerate(self._names) if name not in status]
        return dead, [i for i, name in enumerate(self._names) if status.get(name) is Status.SUSPECT]

    # --- faults

    def crashed(self, node: int) -> Callable[[], bool]:
        """The process is gone. The result tells whether all others know by now."""
        self._now()
        self._net.crash(self._names[node])
        return partial(self._is_known, node, self._nodes[node].core.membership.me.life)

    def _is_known(self, node: int, life: int) -> bool:
        self._now()
        held = [other.core.membership.get(self._names[node]) for other in self._nodes if other.up]
        return all(member is None or not member.here or member.life != life for member in held)

    def returned(self, node: int) -> None:
        """A new process of the same name at the same address, with an empty cache, joins through another node."""
        self._now()
        others = [other.name for other in self._nodes if other.up]
        fresh = self._net.add(self._names[node], self._nodes[node].address)
        self._nodes[node], self._matchers[node] = fresh, self._matcher(fresh)
        self._places.pop(node, None)
        if others:
            self._net.join(fresh.name, self._rng.choice(others))
