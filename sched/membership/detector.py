"""Failure detection: probes, helpers, suspicions and the node's own health, as messages through an outbox. Pure.

Each period the node probes one other node. If no direct answer arrives within the timeout, it asks helpers to probe; a
helper without an answer replies with a nack, which shows that the asker's own network works. A failed probe or an
external report (a broken connection) raises a suspicion. `Detector` issues verdicts; the membership merges them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sched.membership.health import LocalHealth
from sched.membership.member import Address, Member, Preset, Rng, Status, Verdict
from sched.membership.outbox import Outbox
from sched.membership.packet import Message
from sched.membership.probe import Prober
from sched.membership.roster import Roster
from sched.membership.suspicion import Suspicions

Learn = Callable[[float, Verdict], None]


class Detector:
    """`learn` merges a verdict into the membership, which then calls `suspected` or `cleared`."""

    def __init__(
        self, now: float, me: str, preset: Preset, rng: Rng, roster: Roster, out: Outbox, learn: Learn
    ) -> None:
        self.counters: Counter[str] = Counter()  # failed_probes, confirmations
        self.health = LocalHealth()
        self._me, self._preset, self._rng = me, preset, rng
        self._roster, self._out, self._learn = roster, out, learn
        self._prober = Prober(now, preset, rng)
        self._suspicions = Suspicions(preset)

    def wake_at(self) -> float:
        return min(self._prober.wake_at(), self._suspicions.wake_at())

    def shift(self, seconds: float) -> None:
        """This node was paused: do not count its pause as the silence of others."""
        self._prober.shift(seconds)
        self._suspicions.shift(seconds)

    def stop(self, until: float) -> None:
        """Stop probing and suspecting other nodes."""
        self._prober.current, self._prober.next_at = None, until
        self._suspicions.clear()

    def tick(self, now: float) -> None:
        for relay in self._prober.unanswered(now):
            self._out.send(relay.origin, "nack", seq=relay.seq)
        self._probe(now)
        for node_id in self._suspicions.over(now):  # after the probe, which may have confirmed one
            member = self._roster.get(node_id)
            if member is None:
                continue
            if self._suspicions.last_word(now, node_id):
                verdict = Verdict(node_id, member.incarnation, Status.SUSPECT, self._me)
                seq = self._prober.new_seq()
                self._out.send(member.address, "ping", seq=seq, target=node_id, updates=(verdict,))
            else:
                self._learn(now, Verdict(node_id, member.incarnation, Status.DEAD, self._me))

    def _probe(self, now: float) -> None:
        prober, probe = self._prober, self._prober.current
        if now >= prober.next_at:
            if probe is not None:
                self.counters["failed_probes"] += 1
                self.health.bad(probe.helpers - len(probe.nacks) if probe.helpers else 1)
                self.suspect(now, probe.node_id)
            probe = prober.start(now, self._roster.here_ids(), self.health.multiplier)
            if probe is not None and (member := self._roster.get(probe.node_id)) is not None:
                self._out.send(member.address, "ping", seq=probe.seq, target=probe.node_id)
        elif probe is not None and not probe.asked and now >= probe.ask_at:
            probe.asked = True
            if (target := self._roster.get(probe.node_id)) is not None:
                helpers = self._roster.sample(self._rng, self._preset.indirect_probes, but=probe.node_id)
                probe.helpers = len(helpers)
                for helper in helpers:
                    self._out.send(helper.address, "ask", seq=probe.seq, target=probe.node_id, at=target.address)

    def suspect(self, now: float, node_id: str) -> None:
        """This node has a reason to suspect another one: start or confirm a suspicion."""
        member = self._roster.get(node_id)
        if member is not None and member.status in (Status.ALIVE, Status.SUSPECT):
            self._learn(now, Verdict(node_id, member.incarnation, Status.SUSPECT, self._me))

    # --- called by the membership after merging

    def suspected(self, now: float, member: Member, source: str, n: int) -> None:
        """`member` is newly suspected by `source`, in a cluster of n."""
        self._suspicions.start(now, member.node_id, source, n)

    def confirmed(self, verdict: Verdict) -> bool:
        """A known suspicion arrived again. Returns True if its source is new, so that it is worth passing on."""
        held = self._roster.get(verdict.node_id)
        if held is None or (verdict.incarnation, verdict.status) != held.order or verdict.status is not Status.SUSPECT:
            return False
        new = self._suspicions.confirm(verdict.node_id, verdict.source)
        self.counters["confirmations"] += new
        return new

    def cleared(self, node_id: str) -> None:
        """The suspicion has ended: the node is alive, dead or gone."""
        self._suspicions.end(node_id)

    # --- messages

    def answer(self, now: float, source: Address, message: Message) -> None:
        """Handle a message of the probe protocol."""
        match message.kind:
            case "ping" if message.target == self._me:
                self._out.send(source, "ack", seq=message.seq)
            case "ask" if message.address is not None:
                seq = self._prober.relay(now, source, message.seq)
                self._out.send(message.address, "ping", seq=seq, target=message.target)
            case "ack":
                mine, relay = self._prober.answered(message.seq)
                if mine:
                    self.health.good()
                if relay is not None:
                    self._out.send(relay.origin, "ack", seq=relay.seq)
            case "nack":
                self._prober.nacked(source, message.seq)
