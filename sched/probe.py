"""Whom to probe next, and what became of the probes under way: SWIM's failure detector without its messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sched.member import Address, Preset, Rng


@dataclass(slots=True)
class Probe:
    """The probe of this period; it has failed when the next period begins."""

    node_id: str
    seq: int
    ask_at: float  # no direct answer by then: others are asked to try
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Relay:
    """A probe done for another node, which gets the answer under its own number."""

    origin: Address
    seq: int
    expires_at: float


class Prober:
    """One probe per period, round robin in random order: every node is probed within 2n - 3 periods by each other."""

    def __init__(self, now: float, preset: Preset, rng: Rng) -> None:
        self._preset, self._rng = preset, rng
        self._order: list[str] = []
        self._seq = 0
        self._relays: dict[int, Relay] = {}
        self.current: Probe | None = None
        self.next_at = now + rng.random() * preset.probe_period_s

    def wake_at(self) -> float:
        probe = self.current
        return min(probe.ask_at, self.next_at) if probe and not probe.asked else self.next_at

    def start(self, now: float, node_ids: Collection[str]) -> Probe | None:
        """Begin this period's probe of one of `node_ids`; None when there is nobody to probe."""
        self.next_at = now + self._preset.probe_period_s
        self._relays = {seq: relay for seq, relay in self._relays.items() if relay.expires_at > now}
        target = self._next(node_ids) or self._reshuffled(node_ids)
        if target is None:
            self.current = None
        else:
            self.current = Probe(target, self.new_seq(), now + self._preset.probe_timeout_s)
        return self.current

    def answered(self, seq: int) -> Relay | None:
        """An ack came. Returns where to pass it on when the probe was done for somebody else."""
        if self.current is not None and self.current.seq == seq:
            self.current = None
        return self._relays.pop(seq, None)

    def relay(self, now: float, origin: Address, seq: int) -> int:
        """Number under which to probe on behalf of `origin`."""
        own = self.new_seq()
        self._relays[own] = Relay(origin, seq, now + self._preset.probe_period_s)
        return own

    def new_seq(self) -> int:
        self._seq += 1
        return self._seq

    def shift(self, seconds: float) -> None:
        """Move every deadline: the time during which this node itself stood still does not count."""
        self.next_at += seconds
        if self.current is not None:
            self.current.ask_at += seconds

    def _next(self, node_ids: Collection[str]) -> str | None:
        while self._order:
            if (node_id := self._order.pop()) in node_ids:
                return node_id
        return None

    def _reshuffled(self, node_ids: Collection[str]) -> str | None:
        self._order = sorted(node_ids)
        self._rng.shuffle(self._order)
        return self._order.pop() if self._order else None
