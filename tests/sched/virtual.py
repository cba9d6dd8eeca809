"""The virtual cluster as the tests use it: a seed that is printed, toy members, packets held to the size limit."""

from __future__ import annotations

import random

from lab.virtual.cluster import GossipNode, VirtualCluster
from lab.virtual.network import VirtualNode, Weather
from sched.membership.events import SendPacket
from sched.membership.member import Address, Preset, presets
from sched.membership.packet import PACKET_BYTES

ROOT = "00112233445566778899aabbccddeeff"

__all__ = ["ROOT", "GossipNode", "VirtualNet"]


class VirtualNet(VirtualCluster):
    """`loss` and `duplicate` are probabilities per packet, `delay_s` the range of the one-way delay (it reorders)."""

    def __init__(
        self,
        seed: int,
        preset: Preset = presets["local"],
        loss: float = 0.0,
        duplicate: float = 0.0,
        delay_s: tuple[float, float] = (0.0002, 0.003),
    ) -> None:
        print(f"VirtualNet(seed={seed}, loss={loss}, duplicate={duplicate}, delay_s={delay_s})")
        super().__init__(random.Random(seed), random.Random, preset, Weather(loss, duplicate, delay_s))
        self.record_trace()

    @property
    def bytes_sent(self) -> int:
        return sum(node.bytes_sent for node in self.nodes.values())

    def start(
        self, name: str, *, address: Address | None = None, root: str = ROOT, model: str = "toy", block_size: int = 16
    ) -> GossipNode:
        return self.add(name, address, model=model, block_size=block_size, root=root, share=1 << 30)

    def cluster(self, size: int) -> list[GossipNode]:
        """`size` nodes; each joins through a random earlier one, all at nearly the same time."""
        nodes = [self.start(f"n{i}") for i in range(size)]
        for i, node in enumerate(nodes[1:], 1):
            self.join(node.name, nodes[int(self.rng.random() * i)].name)
        return nodes

    def _send(self, node: VirtualNode, packet: SendPacket) -> None:
        assert len(packet.payload) <= PACKET_BYTES, f"packet of {len(packet.payload)} bytes"
        super()._send(node, packet)
