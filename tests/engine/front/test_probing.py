"""Who is read, who is asked, and who is not waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from engine.front import probing
from engine.front.clocks import Clocks
from engine.front.cluster import Cluster
from engine.front.known import Known
from engine.front.probing import Prober, Question
from engine.handoff import messages
from engine.handoff.messages import LoadNow, Probe, Probed, Rates
from net.bodies import decode, encode
from net.channel.channel import RemoteError
from net.channel.wire import Frame
from sched.gossip.load_word import Load, LoadWord
from sched.gossip.record import RECORD as ROW
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.placement.measured_links import MeasuredLinks
from sched.placement.view import View

ROLES = {"p": ("prefill",), "d": ("decode",), "m": ("prefill", "decode")}
RECORD = NodeRecord(blocks_total=100, work_s=1.0, decode_step_s=0.01)
RECORD_ROW = np.frombuffer(RECORD.pack(), ROW)[0]


def probed(question: Probe) -> Frame:
    """The answer of every node."""
    load = LoadNow(RECORD.pack(), 7, 500_000, 0.02, 0.01, 1.0, 0.0, "x")
    rates = Rates(5e8, dict.fromkeys(question.to, 2e8))
    return Frame({"b": encode(Probed(load, rates, local_tokens=48))}, [])


class World:
    """Channel, gossip, transfer engine and load words; `asked` and `read` say who was."""

    def __init__(self, transports: dict[str, str]) -> None:
        self.transports = transports
        self.asked: list[str] = []
        self.read: list[str] = []
        self.slow: set[str] = set()
        self.open: list[asyncio.Future[Frame]] = []
        self.counters: Counter[str] = Counter()
        self.records = dict.fromkeys(ROLES, RECORD)
        holders = SimpleNamespace(state=lambda name: (1, 1))
        self.core = SimpleNamespace(digests=SimpleNamespace(holders=holders))
        self.members = [Member(name, ("h", 1), roles=roles) for name, roles in ROLES.items()]

    def ask(self, peer, kind, body, data=()):
        assert kind == messages.PROBE
        self.asked.append(peer)
        answer = asyncio.get_running_loop().create_future()
        self.open.append(answer)
        if peer == "gone":
            answer.set_exception(RemoteError("no", code="gone"))
        elif peer not in self.slow:
            answer.set_result(probed(decode(Probe, body)))
        return answer

    async def probe(self, peers):
        self.read = list(peers)
        return {peer: Load(LoadWord(work_s=2.0, blocks_total=100, settled=3), 1_000_003, 0) for peer in self.read}

    def record(self, peer):
        return self.records.get(peer)

    def open_soon(self, peer):
        pass

    def is_one_sided(self, peer):
        return self.transports.get(peer) in ("rdma", "shm")

    def path_of(self, peer):
        return SimpleNamespace(transport=self.transports[peer])

    def prober(self, by_message: bool = False):
        """A prober, and what it is asked about all members."""
        self.links = MeasuredLinks()
        prober = Prober(Cluster(self, self, self, self, self), Clocks(), by_message, self.links)
        records = np.array([RECORD_ROW] * len(self.members))
        view = View.of_records(0.0, self.members, records, self.links, 256)
        known = Known(view, self.members, [], np.arange(len(self.members)), [], 0.0)
        return prober, (self.members, Question([b"k" * 16], 1.0, {"m": 32}), known)

    async def probe_all(self, by_message: bool = False, times: int = 2):
        prober, asked = self.prober(by_message)
        for _ in range(times):
            self.asked, self.read = [], []
            answers = await prober.ask(*asked)
        return answers


async def test_on_one_host_only_nodes_that_do_not_prefill_are_read():
    world = World(dict.fromkeys(ROLES, "shm"))
    answers = await world.probe_all()
    assert (world.read, sorted(world.asked)) == (["d"], ["m", "p"])
    assert answers["d"].as_dict()["wait_s"] == pytest.approx(2.0 + 1.0) and answers["d"].one_sided
    assert answers["p"].as_dict()["wait_s"] == pytest.approx(1.5) and answers["p"].local_tokens == 48


async def test_over_rdma_all_are_read_and_their_depth_is_the_digests():
    world = World(dict.fromkeys(ROLES, "rdma"))
    answers = await world.probe_all()
    assert world.asked == [] and sorted(world.read) == ["d", "m", "p"]
    assert answers["m"].local_tokens == 32 and answers["m"].claimed == 1_000_003


async def test_the_first_question_and_what_only_messages_tell_are_messages():
    world = World(dict.fromkeys(ROLES, "rdma"))
    await world.probe_all(times=1)
    assert world.read == [] and len(world.asked) == 3 == world.counters["asked_message"]
    await world.probe_all(by_message=True)
    assert world.read == []


async def test_a_node_that_does_not_answer_is_left_out_soon(monkeypatch):
    monkeypatch.setattr(probing, "LAGGARD_S", 0.02)
    world = World({})
    world.slow = {"m"}
    world.members.append(Member("gone", ("h", 1), roles=("decode",)))
    answers = await asyncio.wait_for(world.probe_all(times=1), 30)
    assert sorted(answers) == ["d", "p"]
    assert all(answer.done() for answer in world.open), "nobody waits for it any more"


async def test_an_answer_after_the_end_changes_nothing():
    """A decision already uses the others."""
    world = World({})
    world.slow = {"m"}
    prober, asked = world.prober()
    asking = prober.begin(*asked)
    await asyncio.sleep(0)
    asking._end()
    late = next(answer for answer in world.open if not answer.done())
    late.set_result(probed(Probe(1.0, [])))
    answers = await asking.answers()
    await asyncio.sleep(0)
    assert sorted(answers) == ["d", "p"]


async def test_questions_that_nobody_waits_for_are_withdrawn():
    world = World({})
    world.slow = {"d", "m", "p"}
    prober, asked = world.prober()
    asking = prober.begin(*asked)
    asking.stop()
    await asyncio.sleep(0)
    assert all(answer.cancelled() for answer in world.open) and await asking.answers() == {}


async def test_what_nodes_say_of_their_rails_bounds_how_fast_kv_is_taken_to_move():
    world = World({})
    await world.probe_all(times=1)
    _, per_byte = world.links.fetch(["p", "nobody"])
    assert per_byte.tolist() == [pytest.approx(1 / 5e8), pytest.approx(1e-9)]
    _, per_byte = world.links.handover("p", ["d", "p"])
    assert per_byte[0] == pytest.approx(1 / 2e8) and per_byte[1] == pytest.approx(1e-9)
