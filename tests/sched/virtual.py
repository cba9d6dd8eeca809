"""A cluster in virtual time: real gossip cores on a seeded network that loses, delays, duplicates, cuts and crashes.

Everything follows from the seed: `VirtualNet(seed=...)` run twice gives the same `trace`. The seed is printed, so a
failing test shows how to replay it. Every node has a clock of its own with a random offset.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

from sched.events import Datagram, Effect, Event, Join, Leave, MemberDown, MemberUp, SendPacket, Tick
from sched.gossip import GossipCore
from sched.member import Address, Member, Preset, presets
from sched.packet import PACKET_BYTES
from sched.state import NodeRecord

ROOT = "00112233445566778899aabbccddeeff"


@dataclass
class VirtualNode:
    name: str
    core: GossipCore
    address: Address
    clock_offset: float
    load: NodeRecord
    up: bool = True
    paused_until: float = 0.0
    inbox: list[Datagram] = field(default_factory=list)  # arrived during a pause
    log: list[tuple[float, Effect]] = field(default_factory=list)  # all effects but packets, in true time

    def downs(self) -> list[tuple[float, MemberDown]]:
        return [(time, effect) for time, effect in self.log if isinstance(effect, MemberDown)]

    def ups(self) -> list[str]:
        return [effect.member.node_id for _, effect in self.log if isinstance(effect, MemberUp)]

    def sees(self) -> set[str]:
        return {member.node_id for member in self.core.membership.alive()}


class VirtualNet:
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
        self.rng = random.Random(seed)
        self.preset, self.loss, self.duplicate, self.delay_s = preset, loss, duplicate, delay_s
        self.now = 0.0
        self.nodes: dict[str, VirtualNode] = {}
        self.side_of: dict[str, int] = {}  # partition: packets between different sides are lost
        self.packets_sent = self.bytes_sent = 0
        self._owners: dict[Address, VirtualNode] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ports = count(1)
        self._trace = blake2b()

    # --- what a test does to the cluster

    def add(
        self, name: str, *, address: Address | None = None, root: str = ROOT, model: str = "toy", block_size: int = 16
    ) -> VirtualNode:
        address = address or ("10.0.0.1", next(self._ports))
        info = {"model": model, "block_size": block_size, "root": root, "share": 1 << 30}
        me = Member(name, address, f"10.0.0.1:{8000 + address[1]}", ("prefill", "decode"), info=info)
        offset = self.rng.uniform(-1e6, 1e6)
        rng = random.Random(self.rng.getrandbits(64))
        holder: list[VirtualNode] = []
        core = GossipCore(self.now + offset, me, self.preset, rng, lambda: holder[0].load)
        node = VirtualNode(name, core, address, offset, NodeRecord(blocks_total=100))
        holder.append(node)
        self.nodes[name] = self._owners[address] = node
        self._feed(node, Tick())
        self._schedule_tick(node)
        return node

    def cluster(self, size: int) -> list[VirtualNode]:
        """`size` nodes; each joins through a random earlier one, all at nearly the same time."""
        nodes = [self.add(f"n{i}") for i in range(size)]
        for i, node in enumerate(nodes[1:], 1):
            self.join(node.name, nodes[self.rng.randrange(i)].name)
        return nodes

    def join(self, name: str, through: str) -> None:
        self._feed(self.nodes[name], Join(self.nodes[through].address))

    def leave(self, name: str) -> None:
        node = self.nodes[name]
        self._feed(node, Leave())
        self._feed(node, Leave())
        node.up = False

    def crash(self, name: str) -> None:
        self.nodes[name].up = False

    def pause(self, name: str, seconds: float) -> None:
        """The node does nothing for a while; what arrives meanwhile waits in its socket."""
        node = self.nodes[name]
        node.paused_until = self.now + seconds
        self.at(node.paused_until, lambda: self._resume(node))

    def partition(self, *sides: Iterable[str]) -> None:
        self.side_of = {name: number for number, side in enumerate(sides) for name in side}

    def heal(self) -> None:
        self.side_of = {}

    def tell(self, name: str, event: Event) -> None:
        self._feed(self.nodes[name], event)

    # --- time

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action))

    def run(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def run_until(self, reached: Callable[[], bool], limit_s: float, check_every_s: float = 0.01) -> float | None:
        """Run until `reached()`; returns the seconds it took, None if it did not happen within `limit_s`."""
        start, next_check = self.now, self.now
        while self._queue and self._queue[0][0] <= start + limit_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if self.now >= next_check:
                next_check = self.now + check_every_s
                if reached():
                    return self.now - start
        self.now = start + limit_s
        return self.now - start if reached() else None

    def converged(self) -> bool:
        """Every node that is up sees exactly the nodes that are up."""
        up = {node.name for node in self.nodes.values() if node.up}
        return all(self.nodes[name].sees() == up for name in up)

    @property
    def trace(self) -> str:
        """Digest of everything sent, by whom and when."""
        return self._trace.hexdigest()

    # --- network

    def _feed(self, node: VirtualNode, event: Event) -> None:
        for effect in node.core.handle(self.now + node.clock_offset, event):
            if isinstance(effect, SendPacket):
                self._send(node, effect)
            else:
                node.log.append((self.now, effect))

    def _send(self, node: VirtualNode, packet: SendPacket) -> None:
        assert len(packet.payload) <= PACKET_BYTES, f"packet of {len(packet.payload)} bytes"
        self.packets_sent += 1
        self.bytes_sent += len(packet.payload)
        self._trace.update(f"{self.now:.9f} {node.name} {packet.address}".encode() + packet.payload)
        for _ in range(2 if self.rng.random() < self.duplicate else 1):
            if self.rng.random() >= self.loss:
                arrival = self.now + self.rng.uniform(*self.delay_s)
                self.at(arrival, lambda: self._deliver(node, packet))

    def _deliver(self, sender: VirtualNode, packet: SendPacket) -> None:
        node = self._owners.get(packet.address)
        if node is None or not node.up or self.side_of.get(sender.name, 0) != self.side_of.get(node.name, 0):
            return
        datagram = Datagram(sender.address, packet.payload)
        if self.now < node.paused_until:
            node.inbox.append(datagram)
        else:
            self._feed(node, datagram)

    def _resume(self, node: VirtualNode) -> None:
        """Timers and socket are served in either order, as an event loop may."""
        inbox, node.inbox = node.inbox, []
        events: list[Event] = [Tick(), *inbox] if self.rng.random() < 0.5 else [*inbox, Tick()]
        for event in events:
            if node.up:
                self._feed(node, event)

    def _schedule_tick(self, node: VirtualNode) -> None:
        wake = max(node.core.wake_at() - node.clock_offset, self.now)
        # A timer fires a little late, as on a real machine; it must never be able to spin at one instant.
        self.at(wake + self.rng.uniform(1e-6, 1e-3), lambda: self._tick(node))

    def _tick(self, node: VirtualNode) -> None:
        if not node.up or self._owners[node.address] is not node:
            return
        if self.now < node.paused_until:
            self.at(node.paused_until + 1e-6, lambda: self._tick(node))
            return
        self._feed(node, Tick())
        self._schedule_tick(node)
