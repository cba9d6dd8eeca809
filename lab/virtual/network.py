"""A network of sans-IO cores in virtual time, with every fault a real one has; all of it follows from the seed. Pure.

A core is anything with `handle(now, event) -> effects` and `wake_at()`; the same objects run under asyncio
(net/gossip/driver.py). Each node has its own clock with an arbitrary offset, so a core that compares two nodes' times
fails here. Time advances from event to event: an idle hour costs as much as its probes.

    packets   lost, delayed (which reorders them), duplicated; cut in one direction or both
    nodes     paused (packets wait in the socket), crashed, restarted under the same or another name
    clocks    any offset, steps forward and back
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from sched.membership.events import Datagram, Effect, Event, SendPacket, Tick
from sched.membership.member import Address, Rng


class Core(Protocol):
    def handle(self, now: float, event: Event) -> list[Effect]: ...
    def wake_at(self) -> float: ...


C = TypeVar("C", bound=Core)


@dataclass(slots=True)
class Weather:
    """What happens to a packet. Probabilities per packet; delays in seconds, one way."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0002, 0.003)
    timer_late_s: float = 0.001  # a timer fires up to this much late, as on a real machine


@dataclass(slots=True, eq=False)
class VirtualNode(Generic[C]):
    """One process. `up` ends with a crash and never returns: a restart is another VirtualNode."""

    name: str
    core: C
    address: Address
    clock_offset: float
    up: bool = True
    paused_until: float = 0.0
    inbox: list[Datagram] = field(default_factory=list)  # arrived during a pause
    tick_at: float = float("inf")  # the Tick that counts; others in the queue are outdated
    packets_sent: int = 0
    bytes_sent: int = 0
    log: list[tuple[float, Effect]] = field(default_factory=list)  # all effects except packets, in true time


Watch = Callable[[VirtualNode[Any], Event], None]
"""Called after every event that a node has handled, to check invariants."""


class VirtualNetwork(Generic[C]):
    """`per_packet_bytes` is added to every packet in the byte counts: IP and UDP headers."""

    def __init__(self, rng: Rng, weather: Weather | None = None, per_packet_bytes: int = 0) -> None:
        self.rng, self.weather = rng, weather or Weather()
        self.now = 0.0
        self.nodes: dict[str, VirtualNode[C]] = {}
        self.watches: list[Watch] = []
        self.events = 0
        self._per_packet_bytes = per_packet_bytes
        self._at: dict[Address, VirtualNode[C]] = {}
        self._cuts: set[tuple[str, str]] = set()  # (from, to): packets that way are lost
        self._queue: list[tuple[float, int, VirtualNode[C] | None, Any]] = []
        self._order = 0
        self._trace: Any = None

    # --- faults and deliveries

    def place(self, node: VirtualNode[C]) -> None:
        """Start a node; it replaces a node that had the same address."""
        former = self._at.get(node.address)
        if former is not None:
            former.up = False
        self.nodes[node.name] = self._at[node.address] = node
        self.feed(node, Tick())

    def crash(self, name: str) -> None:
        self.nodes[name].up = False

    def pause(self, name: str, seconds: float) -> None:
        """The node does nothing for a while; what arrives meanwhile waits in its socket."""
        node = self.nodes[name]
        node.paused_until = max(node.paused_until, self.now + seconds)
        self.at(node.paused_until, lambda: self._resume(node))

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Packets from any of `sources` to any of `targets` are lost; packets in the other direction pass."""
        self._cuts |= {(a, b) for a in sources for b in list(targets)}

    def partition(self, *sides: Iterable[str]) -> None:
        """Cut both ways between all sides; replaces the present cuts."""
        self._cuts.clear()
        parts = [list(side) for side in sides]
        for part in parts:
            for other in parts:
                if part is not other:
                    self.cut(part, other)

    def heal(self) -> None:
        self._cuts.clear()

    def step_clock(self, name: str, seconds: float) -> None:
        """The node's clock jumps, forward or back."""
        node = self.nodes[name]
        node.clock_offset += seconds
        self._arm(node)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at `time` in virtual time."""
        self._push(time, None, action)

    def record_trace(self) -> None:
        """From now on `trace` digests every packet, for tests that a seed replays exactly."""
        self._trace = blake2b()

    @property
    def trace(self) -> str:
        digest: str = self._trace.hexdigest()
        return digest

    # --- time

    def run(self, seconds: float) -> None:
        end, queue = self.now + seconds, self._queue
        while queue and queue[0][0] <= end:
            self._step()
        self.now = end

    def run_until(self, reached: Callable[[], bool], limit_s: float, check_every_s: float = 0.01) -> float | None:
        """Run until `reached()`; returns the seconds it took, None if it did not happen within `limit_s`."""
        start, next_check = self.now, self.now
        while self._queue and self._queue[0][0] <= start + limit_s:
            self._step()
            if self.now >= next_check:
                next_check = self.now + check_every_s
                if reached():
                    return self.now - start
        self.now = start + limit_s
        return self.now - start if reached() else None

    def feed(self, node: VirtualNode[C], event: Event) -> None:
        """Let the node handle an event now."""
        self.events += 1
        for effect in node.core.handle(self.now + node.clock_offset, event):
            if isinstance(effect, SendPacket):
                self._send(node, effect)
            else:
                node.log.append((self.now, effect))
        for watch in self.watches:
            watch(node, event)
        self._arm(node)

    # --- inside

    def _push(self, time: float, node: VirtualNode[C] | None, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, node, what))

    def _step(self) -> None:
        """Handle the next entry of the queue: an action, a Tick (None) or a packet on its way to a node."""
        self.now, _, node, what = heapq.heappop(self._queue)
        if node is None:
            what()
        elif what is None:
            if node.up and node.tick_at == self.now:
                node.tick_at = float("inf")
                if self.now < node.paused_until:
                    return  # _resume serves its timers
                self.feed(node, Tick())
        elif node.up:
            if self.now < node.paused_until:
                node.inbox.append(what)
            else:
                self.feed(node, what)

    def _arm(self, node: VirtualNode[C]) -> None:
        """Queue the next Tick. It fires a little late, so that no core can spin at one instant."""
        wake = max(node.core.wake_at() - node.clock_offset, self.now)
        if wake + self.weather.timer_late_s < node.tick_at:
            node.tick_at = wake + 1e-6 + self.rng.random() * self.weather.timer_late_s
            self._push(node.tick_at, node, None)

    def _send(self, node: VirtualNode[C], packet: SendPacket) -> None:
        node.packets_sent += 1
        node.bytes_sent += len(packet.payload) + self._per_packet_bytes
        if self._trace is not None:
            self._trace.update(f"{self.now:.9f} {node.name} {packet.address}".encode() + packet.payload)
        target, weather, rng = self._at.get(packet.address), self.weather, self.rng
        if target is None or (self._cuts and (node.name, target.name) in self._cuts):
            return
        datagram = Datagram(node.address, packet.payload)
        for _ in range(2 if weather.duplicate and rng.random() < weather.duplicate else 1):
            if not weather.loss or rng.random() >= weather.loss:
                low, high = weather.delay_s
                self._push(self.now + low + (high - low) * rng.random(), target, datagram)

    def _resume(self, node: VirtualNode[C]) -> None:
        """Timers and socket are served in either order, as an event loop may."""
        if self.now < node.paused_until:
            return  # the node was paused again meanwhile
        inbox, node.inbox = node.inbox, []
        events: list[Event] = [Tick(), *inbox] if self.rng.random() < 0.5 else [*inbox, Tick()]
        for event in events:
            if node.up:
                self.feed(node, event)
