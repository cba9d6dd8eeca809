"""Lifeguard's parts by hand: how long a suspicion lasts, what local health does to probes, who says nack."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from sched.membership.events import Datagram, Learn, SendPacket, Suspect, Tick
from sched.membership.health import HIGHEST, LocalHealth
from sched.membership.member import LAST_WORDS, Member, Status, Verdict, presets
from sched.membership.packet import Message, decode_message, encode_message, tag_of, unseal
from sched.membership.suspicion import Suspicion, Suspicions
from sched.membership.swim import Membership

LAN = presets["lan"]


def test_a_suspicion_shrinks_with_the_logarithm_of_confirmations():
    suspicion = Suspicion(100.0, min_s=3.0, max_s=12.0, wanted=3, sources={"a"})
    ends = [suspicion.ends_at]
    for source in "bcd":
        assert suspicion.confirm(source) and not suspicion.confirm(source)
        ends.append(suspicion.ends_at)
    assert ends == pytest.approx([112.0, 107.5, 104.867, 103.0], abs=1e-3)
    assert not suspicion.confirm("e"), "nobody passes on more than is wanted"


@seed(1)
@given(st.lists(st.sampled_from("abcdefg"), max_size=12), st.integers(3, 300))
def test_confirmations_only_ever_shorten_and_never_below_the_minimum(sources, n):
    suspicions = Suspicions(LAN)
    suspicions.start(0.0, "x", "me", n)
    asking_s = LAST_WORDS * LAN.probe_timeout_s
    last = suspicions.wake_at() + asking_s
    assert last == pytest.approx(LAN.suspicion_max_s(n) if n >= 5 else LAN.suspicion_s(n))
    for source in sources:
        suspicions.confirm("x", source)
        assert LAN.suspicion_s(n) - 1e-9 <= suspicions.wake_at() + asking_s <= last
        last = suspicions.wake_at() + asking_s
    if len(set(sources)) >= LAN.confirmations:
        assert last == pytest.approx(LAN.suspicion_s(n))
    now = suspicions.wake_at()
    for _ in range(LAST_WORDS):
        assert not list(suspicions.over(now - 1e-6)) and list(suspicions.over(now)) == ["x"]
        assert suspicions.last_word(now, "x"), "it is asked itself before it is given up"
        now = suspicions.wake_at()
    assert now == pytest.approx(last) and list(suspicions.over(now)) == ["x"]
    assert not suspicions.last_word(now, "x")


def test_local_health_stays_in_its_range():
    health = LocalHealth()
    health.good()
    assert health.multiplier == 1
    health.bad(20)
    assert health.multiplier == HIGHEST + 1
    health.good()
    assert health.multiplier == HIGHEST


class Lone:
    """One core by hand, among peers that exist only as names."""

    def __init__(self, peers: int) -> None:
        self.members = [Member(f"p{i}", ("10.0.0.2", i + 1), life=1) for i in range(peers)]
        self.core = Membership(0.0, Member("me", ("10.0.0.1", 1)), LAN, random.Random(5))
        self.core.handle(0.0, Learn(tuple(self.members)))

    def until(self, time: float) -> list[tuple[float, SendPacket, Message]]:
        """Ticks when due; everything sent."""
        sent = []
        while (now := self.core.wake_at()) <= time:
            for effect in self.core.handle(now, Tick()):
                if isinstance(effect, SendPacket):
                    sent.append((now, effect, decode_message(unseal(effect.payload)[2])))
        return sent

    def hear(self, now: float, member: Member, message: Message) -> list[Message]:
        payload = encode_message(tag_of(member), message)
        effects = self.core.handle(now, Datagram(member.address, payload))
        return [decode_message(unseal(e.payload)[2]) for e in effects if isinstance(e, SendPacket)]


def test_a_node_that_reaches_nobody_slows_its_probes_down():
    lone = Lone(peers=40)
    sent = [(time, m) for time, _, m in lone.until(30.0) if m.kind == "ping"]
    last_words = [m for _, m in sent if [u.node_id for u in m.updates] == [m.target]]
    pings = [time for time, m in sent if m not in last_words]
    assert last_words, "who is about to be given up is asked itself"
    gaps = [b - a for a, b in pairwise(pings)]
    assert gaps[0] == pytest.approx(LAN.probe_period_s)
    assert gaps[-1] == pytest.approx(LAN.probe_period_s * (HIGHEST + 1))
    assert lone.core.counters["local_health"] == HIGHEST


def test_nacks_of_all_helpers_say_that_the_node_itself_is_well():
    lone = Lone(peers=40)
    for _ in range(9):
        sent = lone.until(lone.core.wake_at() + 0.01)
        for time, packet, message in sent:
            if message.kind == "ask":
                helper = next(m for m in lone.members if m.address == packet.address)
                lone.hear(time + 0.2, helper, Message("nack", helper.node_id, 0, seq=message.seq))
    assert lone.core.counters["failed_probes"] >= 2 and lone.core.counters["local_health"] == 0


def test_a_helper_says_nack_in_time_and_still_passes_a_late_ack_on():
    lone = Lone(peers=3)
    asker, target = lone.members[0], lone.members[1]
    ask = Message("ask", asker.node_id, 0, seq=77, target=target.node_id, address=target.address)
    [ping] = lone.hear(0.0, asker, ask)
    assert (ping.kind, ping.target) == ("ping", target.node_id)
    nacks = [(time, m.seq) for time, p, m in lone.until(0.45) if m.kind == "nack" and p.address == asker.address]
    assert nacks == [(pytest.approx(0.8 * LAN.probe_timeout_s), 77)]
    answers = lone.hear(0.45, target, Message("ack", target.node_id, 0, seq=ping.seq))
    assert [(m.kind, m.seq) for m in answers] == [("ack", 77)]


def test_confirmations_are_passed_on_and_bring_the_verdict_forward():
    lone = Lone(peers=40)
    lone.core.handle(0.0, Suspect("p0"))
    for i in (1, 2, 3):
        verdict = Verdict("p0", 0, Status.SUSPECT, f"p{i}")
        lone.hear(0.1 * i, lone.members[i], Message("gossip", f"p{i}", 0, updates=(verdict,)))
    told = {u.source for _, _, m in lone.until(0.4) for u in m.updates if u.node_id == "p0"}
    assert told == {"me", "p1", "p2", "p3"}
    lone.until(LAN.suspicion_s(41) - 0.01)
    assert lone.core.get("p0").status is Status.SUSPECT
    lone.until(LAN.suspicion_s(41) + 0.01)
    assert lone.core.get("p0").status is Status.DEAD
