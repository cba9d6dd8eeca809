"""SWIM membership with Lifeguard: the members of the cluster, without a central node and without reading a clock.

`Membership.handle(now, event)` returns effects; `wake_at()` returns the time of the next Tick. `now` comes from any
steady clock of this node: times of different nodes are never compared.

- sched/membership/detector.py detects failures: a probe per period, helpers, suspicions that confirmations shorten.
  A suspect is told immediately and refutes by raising its incarnation; without a refutation it is dead.
- News travels as rumours on every message, each sent a bounded number of times. A periodic comparison of rosters with
  one other node, and an exchange of the lists if they differ, repairs the effects of packet loss. It also contacts dead
  nodes, which heals partitions.
- A node that notices its own pause moves its deadlines, because its pause is not the silence of others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sched.membership.detector import Detector
from sched.membership.events import (
    Datagram,
    Effect,
    Event,
    GiveUp,
    Join,
    Joined,
    Learn,
    Leave,
    MemberDown,
    MemberSuspected,
    MemberUp,
    Refused,
    Suspect,
    Tick,
)
from sched.membership.joining import Entrance, Successions, contested, obstacle, taken
from sched.membership.member import Address, Member, Preset, Rng, Status, Verdict, supersedes
from sched.membership.outbox import Outbox
from sched.membership.packet import (
    UPDATE_BYTES,
    Kind,
    Message,
    PacketError,
    decode_message,
    encode_update,
    tag_of,
    unseal,
)
from sched.membership.roster import Change, Roster, fingerprint_of
from sched.membership.serial import newer, outbidding

BURST = 64
"""Maximum number of nodes told directly when this node refutes a suspicion or leaves; rumours reach the others."""


class Membership:
    """The cluster as this node sees it. `rng` must differ between processes (it also draws `me.life`).

    Raises ValueError if `me` does not fit into one packet or has a name that peers would not accept.
    """

    def __init__(self, now: float, me: Member, preset: Preset, rng: Rng) -> None:
        if len(encode_update(me)) > UPDATE_BYTES:
            raise ValueError(f"node {me.node_id}: id, http, roles and info are too long for one gossip packet")
        Member.from_wire(me.to_wire())
        self.me = replace(me, life=rng.getrandbits(32))
        self._counters: Counter[str] = Counter()  # refutations, pauses, dropped_<why> ...
        self._preset, self._rng = preset, rng
        self._roster = Roster()
        self._out = Outbox(tag_of(me), preset)
        self._detector = Detector(now, me.node_id, preset, rng, self._roster, self._out, self._learn)
        self._entrance = Entrance(preset, self._out)
        self._successions = Successions()
        self._last = now
        self._gossip_at = now + rng.random() * preset.gossip_period_s
        self._sync_at = now + rng.random() * preset.sync_period_s
        self._pull_at = now
        self._wake_at = self._next_wake()

    # --- queries

    def alive(self) -> list[Member]:
        """This node and all others not known to be dead, in the same order on every node.

        Suspected nodes are included, because homes must not move during a hiccup. Give them no new work: see `status`.
        """
        here = self._roster.here()
        return sorted([self.me, *here], key=lambda member: member.node_id) if self.me.here else list(here)

    def others(self) -> list[Member]:
        """`alive` without this node. Do not modify the list."""
        return self._roster.here()

    def get(self, node_id: str) -> Member | None:
        return self.me if node_id == self.me.node_id else self._roster.get(node_id)

    @property
    def local_health(self) -> int:
        """The health score of this node: sched/membership/health.py."""
        return self._detector.health.score

    @property
    def counters(self) -> Counter[str]:
        """refutations, pauses, failed_probes, confirmations, dropped_<why>, and local_health (0 is best)."""
        return self._counters + self._detector.counters + Counter(local_health=self.local_health)

    def wake_at(self) -> float:
        """Time of the next Tick; late Ticks are harmless."""
        return self._wake_at

    def _next_wake(self) -> float:
        if not self.me.here:
            return self._sync_at
        wake = min(self._sync_at, self._detector.wake_at(), self._entrance.wake_at())
        return min(wake, self._gossip_at) if self._out.has_rumours else wake

    # --- events

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Returns the effects of an event. Never raises for data from other nodes."""
        self._sign()
        self._forgive_pause(now)
        match event:
            case Tick():
                self._tick(now)
            case Datagram(source, payload):
                self._receive(now, source, payload)
            case Join(address):
                self._entrance.ask(now, address)
                self._tick(now)
            case GiveUp():
                self._entrance.stop()
            case Suspect(node_id):
                self._detector.suspect(now, node_id)
            case Learn(members):
                for member in members:
                    self._learn(now, member, spread=False)
            case Leave():
                self._leave(now)
        self._wake_at = self._next_wake()
        return self._out.collect()

    def _forgive_pause(self, now: float) -> None:
        late = now - max(self._last, min(self._wake_at, now))
        gap, self._last = now - self._last, now
        if late > self._preset.gossip_period_s + self._preset.probe_timeout_s:
            self._counters["pauses"] += 1
            self._detector.shift(gap)

    def _tick(self, now: float) -> None:
        if not self.me.here:
            self._sync_at = now + self._preset.sync_period_s
            return
        self._detector.tick(now)
        if now >= self._gossip_at and self._out.has_rumours:
            self._gossip_at = now + self._preset.gossip_period_s
            for member in self._some(self._preset.fanout):
                self._out.gossip(member.address)
        if now >= self._sync_at:
            self._sync_at = now + self._preset.sync_s(len(self._roster.here()) + 1)
            self._roster.forget_before(now - self._preset.dead_keep_s)
            lost = [member for member in self._roster.gone() if not self._roster.at(member.address)]
            for member in [*self._some(1), *lost[-BURST:]]:
                self._out.send(member.address, "compare", fingerprint=self._fingerprint())
        self._entrance.tick(now, self.me)

    # --- statements

    def _learn(self, now: float, statement: Member | Verdict, spread: bool = True) -> None:
        """Merge a statement. If it is newer, act on it and pass it on."""
        if statement.node_id == self.me.node_id:
            self._hear_of_me(statement)
        elif (change := self._roster.merge(now, statement)) is not None:
            if spread:
                self._out.tell(statement)
            self._follow(now, change, statement)
        elif isinstance(statement, Verdict) and self._detector.confirmed(statement):
            self._out.tell(statement, keep_old=True)

    def _follow(self, now: float, change: Change, statement: Member | Verdict) -> None:
        before, after = change.before, change.after
        if after.status is Status.SUSPECT:
            source = statement.source if isinstance(statement, Verdict) else ""
            self._detector.suspected(now, after, source, len(self._roster.here()) + 1)
            verdict = Verdict(after.node_id, after.incarnation, Status.SUSPECT, self.me.node_id)
            self._out.send(after.address, "gossip", updates=(verdict,))  # the sooner it knows, the sooner it refutes
            self._out.effect(MemberSuspected(after.node_id))
        else:
            self._detector.cleared(after.node_id)
        if before is not None and before.here and (change.restarted or not after.here):
            self._out.effect(MemberDown(before, change.cause(statement)))
        if after.here and (before is None or not before.here or change.restarted):
            self._out.effect(MemberUp(after))

    def _hear_of_me(self, statement: Member | Verdict) -> None:
        """Another node has a false statement about this node: outbid it."""
        mine = isinstance(statement, Member) and statement.life == self.me.life and statement.status is Status.ALIVE
        known = (statement.incarnation, statement.status)
        if not self.me.here or supersedes(self.me.order, known) or (mine and known == self.me.order):
            return
        self._counters["refutations"] += 1
        self._detector.health.bad()
        self._outbid(statement.incarnation)

    def outbid(self, incarnation: int) -> None:
        """A load record of this node has this incarnation and was not written by this process: outbid it."""
        if self.me.here and not newer(self.me.incarnation, incarnation):
            self._outbid(incarnation)
            self._out.tell(self.me)
            self._wake_at = self._next_wake()

    def _outbid(self, incarnation: int) -> None:
        self.me = replace(self.me, incarnation=outbidding(incarnation, self.me.incarnation, self._rng))
        self._sign()
        self._out.tell(self.me)
        for member in self._some(BURST):
            self._out.send(member.address, "gossip", updates=(self.me,))

    def _refuted(self, statement: Member | Verdict) -> bool:
        """Whether the statement suspects this node in an incarnation that it has already refuted."""
        doubted = statement.node_id == self.me.node_id and statement.status in (Status.SUSPECT, Status.DEAD)
        return doubted and supersedes(self.me.order, (statement.incarnation, statement.status))

    def _leave(self, now: float) -> None:
        self.me = replace(self.me, status=Status.LEFT)
        self._entrance.stop()
        self._sync_at = now + self._preset.sync_period_s
        self._detector.stop(self._sync_at)
        farewell = Verdict(self.me.node_id, self.me.incarnation, Status.LEFT, self.me.node_id)
        for member in self._some(BURST):
            self._out.send(member.address, "gossip", updates=(farewell,))

    # --- messages

    def _receive(self, now: float, source: Address, payload: bytes) -> None:
        try:
            kind, tag, body = unseal(payload)
            if kind is not Kind.SWIM:
                raise PacketError("kind")
            message = decode_message(body)
            if tag != self._out.tag and message.kind not in ("join", "refuse"):
                raise PacketError("foreign")
        except PacketError as error:
            self._counters[f"dropped_{error}"] += 1
            return
        if not self.me.here or (message.sender == self.me.node_id and message.kind not in ("join", "refuse")):
            return
        if message.kind == "join":
            self._admit(now, source, message)
        elif message.kind == "refuse":
            if self._entrance.refused(message, self.me):
                self._out.effect(Refused(self.me.node_id, message.reason))
        else:
            self._correct(now, source, message)
            for update in message.updates:
                self._learn(now, update)
            if message.kind == "ping" and any(self._refuted(update) for update in message.updates):
                self._out.send(source, "gossip", updates=(self.me,))  # it missed the refutation
            self._answer(now, source, message)

    def _answer(self, now: float, source: Address, message: Message) -> None:
        if message.kind == "compare":
            if message.fingerprint != self._fingerprint():
                self._send_list("sync", source)
        elif message.kind == "sync" and message.page == 0:
            self._send_list("synced", source)
        elif message.kind == "welcome":
            if self._entrance.welcomed(message):
                self._out.tell(self.me)
                self._out.effect(Joined())
        else:
            self._detector.answer(now, source, message)

    def _correct(self, now: float, source: Address, message: Message) -> None:
        """If the sender is unknown here, exchange lists. If it is considered suspected or dead, let it refute."""
        held = self._roster.get(message.sender)
        if held is None:
            if now >= self._pull_at and message.kind not in ("welcome", "synced"):
                self._pull_at = now + self._preset.gossip_period_s
                self._send_list("sync", source)
        elif (
            message.kind != "gossip"  # two nodes that consider each other dead must not answer answers
            and held.status in (Status.SUSPECT, Status.DEAD)
            and not newer(message.incarnation, held.incarnation)
        ):
            verdict = Verdict(held.node_id, held.incarnation, held.status, self.me.node_id)
            self._out.send(source, "gossip", updates=(verdict,))

    # --- joining

    def _admit(self, now: float, source: Address, message: Message) -> None:
        """Answer a join: welcome with the member list, or refuse with the reason."""
        joiner = message.updates[0] if message.updates else None
        if not isinstance(joiner, Member) or joiner.node_id != message.sender:
            self._counters["dropped_malformed"] += 1
            return
        holder = self.get(joiner.node_id)
        reason = obstacle(self.me, holder, joiner)
        if reason is None and holder is not None and contested(holder, joiner):
            if self._successions.waits(holder, joiner):
                self._counters["waiting_joins"] += 1
                self._detector.suspect(now, joiner.node_id)
                return
            reason = taken(holder)
        self._successions.over(joiner.node_id)
        if reason is not None:
            self._counters["refused_joins"] += 1
            self._out.effect(Refused(joiner.node_id, reason))
            self._out.send(source, "refuse", target=joiner.node_id, reason=reason)
            return
        for former in self._roster.at(joiner.address):
            if former.node_id != joiner.node_id:  # the address has a new owner, so the former node is dead
                self._learn(now, Verdict(former.node_id, former.incarnation, Status.DEAD, self.me.node_id))
        self._learn(now, joiner)
        self._send_list("welcome", source)

    def _sign(self) -> None:
        self._out.address(self.me, len(self._roster.here_ids()) + 1)

    def _fingerprint(self) -> int:
        return self._roster.fingerprint ^ fingerprint_of(self.me)

    def _send_list(self, kind: str, address: Address) -> None:
        self._out.send_pages(kind, address, [self.me, *self._roster.all()])

    def _some(self, count: int) -> list[Member]:
        return self._roster.sample(self._rng, count)
