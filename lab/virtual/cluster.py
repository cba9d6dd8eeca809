"""A cluster of gossip cores on a virtual network: real protocol code, real packets, no real time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from lab.virtual.network import VirtualNetwork, VirtualNode, Weather
from sched.gossip.core import GossipCore
from sched.gossip.state import NodeRecord
from sched.membership.events import Event, Join, Learn, Leave, MemberDown, MemberUp
from sched.membership.member import Address, Member, Preset, Rng


class GossipNode(VirtualNode[GossipCore]):
    """A node and the load it reports."""

    load: NodeRecord

    def downs(self) -> list[tuple[float, MemberDown]]:
        return [(time, effect) for time, effect in self.log if isinstance(effect, MemberDown)]

    def ups(self) -> list[str]:
        return [effect.member.node_id for _, effect in self.log if isinstance(effect, MemberUp)]

    def sees(self) -> set[str]:
        return {member.node_id for member in self.core.membership.alive()}


class VirtualCluster(VirtualNetwork[GossipCore]):
    """`rng_of(bits)` makes a generator from a seed: every core has its own, like every process."""

    def __init__(
        self,
        rng: Rng,
        rng_of: Callable[[int], Rng],
        preset: Preset,
        weather: Weather | None = None,
        per_packet_bytes: int = 0,
    ) -> None:
        super().__init__(rng, weather, per_packet_bytes)
        self.preset, self._rng_of = preset, rng_of
        self._ports = count(1)

    def load_of(self, node: GossipNode) -> NodeRecord:
        """The load that the node reports in this state period; a simulator overrides it."""
        return node.load

    def node(self, name: str) -> GossipNode:
        found = self.nodes[name]
        assert isinstance(found, GossipNode)
        return found

    def add(self, name: str, address: Address | None = None, **info: Any) -> GossipNode:
        """Start a node that knows no other. `address`: by default a new one; it may be that of a crashed node."""
        number = next(self._ports)
        address = address or (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 7000)
        me = Member(name, address, f"{address[0]}:8000", ("prefill", "decode"), info=info)
        offset = (self.rng.random() - 0.5) * 2e6
        holder: list[GossipNode] = []
        core = GossipCore(
            self.now + offset,
            me,
            self.preset,
            self._rng_of(self.rng.getrandbits(64)),
            lambda: self.load_of(holder[0]),
        )
        node = GossipNode(name, core, address, offset)
        node.load = NodeRecord(blocks_total=100)
        holder.append(node)
        self.place(node)
        return node

    def acquaint(self, nodes: Iterable[GossipNode] | None = None) -> None:
        """Make all of these nodes know each other, as if each had joined."""
        known = [self.node(name) for name in self.nodes] if nodes is None else list(nodes)
        members = tuple(node.core.membership.me for node in known)
        for node in known:
            self.feed(node, Learn(tuple(member for member in members if member.node_id != node.name)))

    def join(self, name: str, through: str) -> None:
        self.feed(self.nodes[name], Join(self.nodes[through].address))

    def leave(self, name: str) -> None:
        node = self.nodes[name]
        self.feed(node, Leave())
        self.feed(node, Leave())
        node.up = False

    def tell(self, name: str, event: Event) -> None:
        self.feed(self.nodes[name], event)

    def up(self) -> list[GossipNode]:
        return [self.node(name) for name, node in self.nodes.items() if node.up]

    def converged(self) -> bool:
        """Whether every node that is up sees exactly the nodes that are up."""
        up = self.up()
        names = {node.name for node in up}
        return all(node.sees() == names for node in up)
