"""One node's complete gossip: membership, load records, cache digests and cells behind one `handle`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sched.gossip.cells import CellPlane, Rows, bits_for, cell_of
from sched.gossip.digest_exchange import DigestExchange
from sched.gossip.exchange import Exchange
from sched.gossip.other_cells import in_better_cell
from sched.gossip.record import RECORD, node_key
from sched.gossip.state import ClusterView, NodeRecord
from sched.membership.events import Datagram, Effect, Event, MemberDown, MemberUp, Tick
from sched.membership.member import Member, Preset, Rng
from sched.membership.packet import Kind, PacketError, tag_of, unseal
from sched.membership.steady import SteadyClock
from sched.membership.swim import Membership


class GossipCore:
    """The membership knows the members. The view has the records, and the digests have the cached keys, of this node's
    cell, which is the whole cluster up to `Preset.cell_nodes` members. Other cells are known by summaries (`cells`).

    `record` is called for this node's load once per state period. The cache adds and discards keys at `digests.own`;
    `digests.holders` finds the holders of keys, including this node.
    """

    def __init__(self, now: float, me: Member, preset: Preset, rng: Rng, record: Callable[[], NodeRecord]) -> None:
        self._clock = SteadyClock(now)
        self._preset, self._record = preset, record
        self.membership = Membership(now, me, preset, rng)
        self.view = ClusterView(me.node_id)
        self.digests = DigestExchange(now, me.node_id, tag_of(me), preset, rng)
        self.cells = CellPlane(now, me.node_id, tag_of(me), preset, rng)
        self._publish_at = now
        self._exchange = Exchange(now, self.view, tag_of(me), preset, rng)
        self._damaged: Counter[str] = Counter()
        self._bits = 0  # number of key bits that identify a cell
        self._others: list[Member] = []  # the membership's list from which `_mates` was made
        self._mates: list[Member] = []  # the other members of this cell
        self._admitted: set[str] = set()

    @property
    def counters(self) -> dict[str, int]:
        """Counters of all planes; dropped_<why> counts invalid datagrams."""
        planes = (self._exchange, self.digests, self.cells)
        return dict(sum((plane.counters for plane in planes), self.membership.counters + self._damaged))

    def records(self, now: float) -> dict[str, NodeRecord]:
        """Load by node id; see ClusterView.records."""
        return self.view.records(self._clock.at(now))

    def record(self, now: float, node_id: str) -> NodeRecord | None:
        """The record of one node of this cell; see ClusterView.get."""
        return self.view.get(node_id, self._clock.at(now))

    def table(self, now: float) -> tuple[list[str], Rows]:
        """The records of this cell as arrays; see ClusterView.table."""
        return self.view.table(self._clock.at(now))

    def elsewhere(self, now: float, rng: Rng) -> list[Member]:
        """Members of other cells to ask in addition to this cell's; see sched/gossip/other_cells.py."""
        if not self._bits:
            return []
        own = cell_of(node_key(self.view.node_id), self._bits)
        return in_better_cell(self.summaries(now), self._bits, own, self.membership.others(), rng)

    def summaries(self, now: float) -> Rows:
        """Summaries of all cells, including this one; see CellPlane.summaries."""
        return self.cells.summaries(self._clock.at(now))

    def mates(self) -> list[Member]:
        """The other members of this node's cell, sorted by id. Do not modify the list."""
        others = self.membership.others()
        if others is not self._others:  # a member joined, left or changed its status
            self._others = self._mates = others
            if self._bits:
                cell = cell_of(node_key(self.view.node_id), self._bits)
                self._mates = [m for m in others if cell_of(node_key(m.node_id), self._bits) == cell]
        return self._mates

    def wake_at(self) -> float:
        """Time of the next Tick."""
        planes = min(self._exchange.next_at, self._look_at, self.digests.next_at, self.cells.next_at)
        return self._clock.theirs(min(self.membership.wake_at(), planes))

    @property
    def _look_at(self) -> float:
        """Time at which this node's load is read next: right before an exchange, so that it offers the newest load.
        While exchanges are seldom, it is read between them too: a change is not noticed later than under load."""
        seldom = not self._exchange.quick and bool(self.mates())
        return self._publish_at if seldom else max(self._publish_at, self._exchange.next_at)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Returns the effects of an event. Never raises for data from other nodes."""
        now = self._clock.at(now)
        if isinstance(event, Datagram):
            return self._receive(now, event)
        effects = self._followed(self.membership.handle(now, event))
        if isinstance(event, Tick):
            if now >= self._look_at:
                if (rival := self.view.rival) is not None:
                    self.view.rival = None
                    self.membership.outbid(rival)
                period_s = self._preset.state_s(len(self.mates()) + 1)
                self._publish_at = max(self._publish_at + period_s, now + period_s / 2)
                self.view.publish(now, self.membership.me.incarnation, self._stamped())
            effects += self._exchange.tick(now, self.mates())
            effects += self.digests.tick(now, self.mates())
            if now >= self.cells.next_at:
                records = self.view.table(now)[1] if self._bits else np.zeros(0, RECORD)
                effects += self.cells.tick(now, self._bits, self.mates(), self.membership.others(), records)
        return effects

    def _stamped(self) -> NodeRecord:
        """This node's record, completed with the fields that only gossip knows."""
        health, epoch = self.membership.local_health, self.digests.own.epoch & 0xFFFF
        return replace(self._record(), health=health, digest_epoch=epoch)

    def _receive(self, now: float, event: Datagram) -> list[Effect]:
        try:
            kind, tag, body = unseal(event.payload)
        except PacketError as error:
            self._damaged[f"dropped_{error}"] += 1
            return []
        match kind:
            case Kind.SWIM:
                return self._followed(self.membership.handle(now, event))
            case Kind.HELD | Kind.CHANGES | Kind.COPY:
                return [*self.digests.receive(event.source, kind, tag, body)]
            case Kind.CELL_AGES | Kind.CELLS:
                return [*self.cells.receive(now, event.source, kind, tag, body)]
        return [*self._exchange.receive(now, event.source, kind, tag, body)]

    # --- following the membership

    def _followed(self, effects: list[Effect]) -> list[Effect]:
        """Let the other planes follow the membership."""
        if not any(isinstance(effect, MemberUp | MemberDown) for effect in effects):
            return effects
        for effect in effects:
            if isinstance(effect, MemberDown):
                self._forget(effect.node_id)
        others = self.membership.others()
        keys = np.array([node_key(member.node_id) for member in [*others, self.membership.me]], np.uint64)
        self._bits, self._others = bits_for(keys, self._preset.cell_nodes), []
        mates = {member.node_id for member in self.mates()}
        for node_id in self._admitted - mates:
            self._forget(node_id)
        for node_id in sorted(mates - self._admitted):
            self._admitted.add(node_id)
            self.view.admit(node_id)
            self.digests.admit(node_id)
        return effects

    def _forget(self, node_id: str) -> None:
        self._admitted.discard(node_id)
        self.view.forget(node_id)
        self.digests.forget(node_id)
