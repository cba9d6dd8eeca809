"""Chooses the next node to probe and tracks running probes: SWIM's failure detector without its messages."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from sched.membership.member import Address, Preset, Rng

NACK_SHARE = 0.8
"""A helper sends a nack after this share of the probe timeout, which is before the asker's period ends."""


@dataclass(slots=True)
class Probe:
    """The probe of this period. It has failed if it is open when the next period begins."""

    node_id: str
    seq: int
    ask_at: float  # without a direct answer by then, helpers are asked
    asked: bool = False
    helpers: int = 0  # number of helpers asked
    nacks: set[Address] = field(default_factory=set)  # helpers that reported no answer, so they are reachable


@dataclass(slots=True)
class Relay:
    """A probe for another node, which gets the answer with its own sequence number."""

    origin: Address
    seq: int
    nack_at: float
    expires_at: float


class Prober:
    """One probe per period, round robin in random order: each node probes every other within 2n - 3 periods."""

    def __init__(self, now: float, preset: Preset, rng: Rng) -> None:
        self._preset, self._rng = preset, rng
        self._order: list[str] = []
        self._seq = 0
        self._relays: dict[int, Relay] = {}
        self.current: Probe | None = None
        self.next_at = now + rng.random() * preset.probe_period_s

    def wake_at(self) -> float:
        probe = self.current
        own = min(probe.ask_at, self.next_at) if probe and not probe.asked else self.next_at
        if not self._relays:
            return own
        return min(own, min(relay.nack_at for relay in self._relays.values()))

    def start(self, now: float, node_ids: Collection[str], slowness: int = 1) -> Probe | None:
        """Begin this period's probe of one of `node_ids`. Returns None if there is no node to probe.

        `slowness` multiplies period and timeout (sched/membership/health.py).
        """
        self.next_at = now + self._preset.probe_period_s * slowness
        self._relays = {seq: relay for seq, relay in self._relays.items() if relay.expires_at > now}
        target = self._next(node_ids) or self._reshuffled(node_ids)
        if target is None:
            self.current = None
        else:
            self.current = Probe(target, self.new_seq(), now + self._preset.probe_timeout_s * slowness)
        return self.current

    def answered(self, seq: int) -> tuple[bool, Relay | None]:
        """An ack arrived. Returns (whether it ends this node's probe, the relay if the probe was for another node)."""
        mine = self.current is not None and self.current.seq == seq
        if mine:
            self.current = None
        return mine, self._relays.pop(seq, None)

    def nacked(self, helper: Address, seq: int) -> None:
        """A helper of this node's probe reported no answer, so the helper is reachable."""
        if self.current is not None and self.current.seq == seq:
            self.current.nacks.add(helper)

    def relay(self, now: float, origin: Address, seq: int) -> int:
        """The sequence number for a probe on behalf of `origin`."""
        own = self.new_seq()
        nack_at = now + NACK_SHARE * self._preset.probe_timeout_s
        self._relays[own] = Relay(origin, seq, nack_at, now + self._preset.probe_period_s)
        return own

    def unanswered(self, now: float) -> list[Relay]:
        """Probes for others whose nack is due, each once. A late ack is still passed on."""
        due = [relay for relay in self._relays.values() if relay.nack_at <= now]
        for relay in due:
            relay.nack_at = math.inf
        return due

    def new_seq(self) -> int:
        self._seq += 1
        return self._seq

    def shift(self, seconds: float) -> None:
        """Move every deadline by `seconds`, the time during which this node was paused."""
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
