"""The shape of the tree, the place of each node in it, and the links between two nodes.

    core        between pods, never a bottleneck by itself
    pod         racks; its links to the core are `pod_ratio` times oversubscribed
    rack        hosts; its links to the switches of the pod are `rack_ratio` times oversubscribed
    host        nodes that reach each other without a NIC

Each node has a NIC of its own. The parallel links above a rack or a pod count as one, as wide as all of them: packets
are spread evenly over equal paths. The nodes of each role are spread evenly over the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sched.placement.links import Place

HOST_BYTES_S = 200e9
"""Between two nodes of one host: NVLink of an A800, one way."""

Link = tuple[str, str]
"""(what it leads out of or into: a node, rack, pod or host; up, down or inside)"""


@dataclass(frozen=True, slots=True)
class FatTree:
    """Nodes of a host, hosts of a rack, racks of a pod; as many pods as the nodes need."""

    nodes: int
    hosts: int
    racks: int
    rack_ratio: float = 1.0
    pod_ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From NODESxHOSTSxRACKS[:RACK_RATIO[:POD_RATIO]]. Raises ValueError."""
        shape, *ratios = text.split(":")
        try:
            nodes, hosts, racks = map(int, shape.split("x"))
            found = cls(nodes, hosts, racks, *map(float, ratios))
        except (ValueError, TypeError):
            raise ValueError(f"{text!r} is not NODESxHOSTSxRACKS[:RACK_RATIO[:POD_RATIO]], such as 2x2x2:2:4") from None
        if min(nodes, hosts, racks) < 1 or not all(1 <= one < math.inf for one in (found.rack_ratio, found.pod_ratio)):
            raise ValueError(f"{text!r}: every number of a tree must be at least 1")
        return found

    def places(self, roles: Sequence[Sequence[str]]) -> dict[str, Place]:
        """Node -> (pod, rack, host), from the names of the nodes of each role."""
        each = [
            ((i + 0.5) / len(names), role, name) for role, names in enumerate(roles) for i, name in enumerate(names)
        ]
        found: dict[str, Place] = {}
        for number, (_, _, name) in enumerate(sorted(each)):
            host = number // self.nodes
            rack = host // self.hosts
            found[name] = (f"pod{rack // self.racks}", f"rack{rack}", f"host{host}")
        return found

    def capacity(self, link: Link, nic_bytes_s: float) -> float:
        """Bytes per second of a link, one way; `nic_bytes_s`: of a NIC."""
        name, way = link
        if way == "inside":
            return HOST_BYTES_S
        rack = self.nodes * self.hosts * nic_bytes_s / self.rack_ratio
        if name.startswith("rack"):
            return rack
        return rack * self.racks / self.pod_ratio if name.startswith("pod") else nic_bytes_s


def path(source: str, target: str, places: dict[str, Place]) -> tuple[Link, ...]:
    """The links from one node to another one."""
    (pod, rack, host), (to_pod, to_rack, to_host) = places[source], places[target]
    if host == to_host:
        return ((host, "inside"),)
    between: list[Link] = []
    if rack != to_rack:
        between = [(rack, "up"), (to_rack, "down")]
        if pod != to_pod:
            between[1:1] = [(pod, "up"), (to_pod, "down")]
    return ((f"node {source}", "up"), *between, (f"node {target}", "down"))
