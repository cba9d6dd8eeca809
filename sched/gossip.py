"""One node's gossip as a whole: membership and load records behind one `handle`, ready for any driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sched.events import Datagram, Effect, Event, MemberDown, MemberUp, Tick
from sched.exchange import Exchange
from sched.member import Member, Preset, Rng
from sched.membership import Membership
from sched.packet import Kind, PacketError, tag_of, unseal
from sched.state import ClusterView, NodeRecord
from sched.steady import SteadyClock


class GossipCore:
    """Membership decides who is there, the view holds records of those, the exchange keeps the view fresh.

    `record` is asked for this node's load once per state period.
    """

    def __init__(self, now: float, me: Member, preset: Preset, rng: Rng, record: Callable[[], NodeRecord]) -> None:
        self._clock = SteadyClock(now)
        self.membership = Membership(now, me, preset, rng)
        self.view = ClusterView(me.node_id)
        self._exchange = Exchange(now, self.view, tag_of(me), preset, rng)
        self._record = record
        self._damaged: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        """Of both planes; dropped_<why> are datagrams that were not understood."""
        return dict(self.membership.counters + self._exchange.counters + self._damaged)

    def records(self, now: float) -> dict[str, NodeRecord]:
        """Load by node id; see ClusterView.records."""
        return self.view.records(self._clock.at(now))

    def wake_at(self) -> float:
        """When the next Tick is due."""
        return self._clock.theirs(min(self.membership.wake_at(), self._exchange.next_at))

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Never raises for anything that came from outside."""
        now = self._clock.at(now)
        if isinstance(event, Datagram):
            return self._receive(now, event)
        effects = self._followed(self.membership.handle(now, event))
        if isinstance(event, Tick) and now >= self._exchange.next_at:
            self.view.publish(now, self.membership.me.incarnation, self._record())
            effects += self._exchange.tick(now, self.membership.others())
        return effects

    def _receive(self, now: float, event: Datagram) -> list[Effect]:
        try:
            kind, tag, body = unseal(event.payload)
        except PacketError as error:
            self._damaged[f"dropped_{error}"] += 1
            return []
        if kind is Kind.SWIM:
            return self._followed(self.membership.handle(now, event))
        return [*self._exchange.receive(now, event.source, kind, tag, body)]

    def _followed(self, effects: list[Effect]) -> list[Effect]:
        """Let the view follow the membership."""
        for effect in effects:
            match effect:
                case MemberUp(member):
                    self.view.admit(member.node_id)
                case MemberDown(member):
                    self.view.forget(member.node_id)
        return effects
