"""What happens between a decision and the prompt: claims, runners-up, redirects; and policies from a user's file."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.config.config import Config
from engine.config.flags import UsageError, parse
from engine.front.attempts import Attempts
from engine.front.claiming.claims import Claims
from engine.front.declined import no_placement, turned_away
from engine.front.known import with_silent
from engine.front.placed import Placed, ProbeAnswer
from engine.front.placement_policy import placement_policy
from engine.front.placing import Placer
from engine.handoff.messages import Promise
from engine.handoff.own_load import OwnLoad
from engine.sampling.params import SamplingParams
from engine.sites.finder import SiteFinder
from net.channel.channel import RemoteError
from net.gossip.load_words import Claim
from net.http.common.frontend import Overloaded, Unavailable
from sched.gossip.intents import Coming
from sched.gossip.state import NodeRecord
from sched.membership.member import Member
from sched.placement.burst import Choice
from sched.placement.choice import Placement, Rejected
from sched.placement.demand import Demand
from sched.placement.measured_links import MeasuredLinks
from sched.placement.two_stages import TwoStages
from sched.placement.view import Candidate, View
from sched.rejection import Estimate, Rejection, rejections

MIXED = ("prefill", "decode", "store")
DEMAND = Demand(
    num_tokens=1000, max_tokens=10, pool_tokens=0, block_size=16, handover_token_bytes=1000, fetch_token_bytes=1000
)


def node(name: str, wait_s: float = 0.0) -> Candidate:
    return Candidate(
        node_id=name, roles=MIXED, wait_s=wait_s, prefill=(0.0, 1e-3, 0.0), free_blocks=999, total_blocks=999,
        step_s=0.01,
    )  # fmt: skip


@dataclass
class Words:
    """Counters of claims; `others` is what somebody else claims just before us, by node."""

    others: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    outstanding: int = 0
    arrivals: list[int] = field(default_factory=list)

    async def reserve(self, peer: str, amount: int) -> Claim:
        previous = self.counters.get(peer, 0) + self.others.pop(peer, 0)
        self.counters[peer] = previous + amount
        return Claim(peer, amount, previous, 9e9, one_sided=False)

    async def release(self, claim: Claim) -> None:
        self.released.append(claim.peer)

    def arrived(self, amount: int) -> None:
        self.arrivals.append(amount)


def choice_of(*nodes: Candidate, avoid: tuple[str, ...] = ()) -> Choice:
    view = View(5.0, nodes, MeasuredLinks(), 256)
    return Choice(placement_policy(Config(), random.Random(0)), 5.0, DEMAND, view, view.none, avoid)


async def secured(words: Words, *nodes: Candidate, coming: dict[str, Coming] | None = None):
    choice = choice_of(*nodes)
    choice.expect(coming or {}, DEMAND.block_size)
    claimed = {one.node_id: 0 for one in nodes}
    return await Claims(words).secure(accepted(choice.decide()), choice, claimed)


async def test_a_claim_nobody_disputes_stands():
    decision, claim, given_up = await secured(Words(), node("a"), node("b", 0.5))
    assert (decision.prefill, claim.peer, claim.amount, given_up) == ("a", "a", 1_000_000, 0)


async def test_who_finds_that_others_came_in_between_takes_the_runner_up():
    words = Words({"a": 3_000_000})
    decision, claim, given_up = await secured(words, node("a"), node("b", 0.5))
    assert (decision.prefill, claim.peer, given_up, words.released) == ("b", "b", 1, ["a"])


async def test_a_choice_that_stays_the_best_keeps_its_claim():
    words = Words({"a": 400_000})
    decision, claim, given_up = await secured(words, node("a"), node("b", 2.0))
    assert (decision.prefill, given_up, words.released) == ("a", 0, [])
    assert claim is not None


async def test_runners_up_are_given_up_twice_at_most():
    words = Words({"a": 10_000_000, "b": 10_000_000, "c": 10_000_000, "d": 10_000_000})
    decision, claim, given_up = await secured(words, *(node(name, 0.1 * i) for i, name in enumerate("abcd")))
    assert given_up == 2 and decision.prefill == "c" and claim is not None


async def test_the_claim_of_what_is_waited_for_counts_once():
    """a computes the prompt's prefix, 1 s of work that it had not told of yet; the claim of just that comes in."""
    coming = {"a": Coming(60, 1.0)}
    decision, _, given_up = await secured(Words({"a": 1_000_000}), node("a"), node("b"), coming=coming)
    assert (decision.prefill, given_up) == ("a", 0)
    assert decision.estimates["ttft_s"] == pytest.approx(1.04)
    decision, _, given_up = await secured(Words({"a": 1_900_000}), node("a"), node("b"), coming=coming)
    assert (decision.prefill, given_up) == ("b", 1), "others came, too"
    busy = node("a", 0.4)
    decision, _, _ = await secured(Words({"a": 600_000}), busy, node("b"), coming=coming)
    assert (decision.prefill, decision.estimates["wait_s"]) == ("a", pytest.approx(1.0)), "0.4 s of it were known"


def test_a_node_that_sent_a_prompt_away_gets_it_again_only_if_all_others_are_much_later():
    assert accepted(choice_of(node("a"), node("b", 0.4), avoid=("a",)).decide()).prefill == "b"
    assert accepted(choice_of(node("a"), node("b", 9.0), avoid=("a",)).decide()).prefill == "a"
    assert accepted(choice_of(node("a"), node("b", 0.4), avoid=("gone",)).decide()).prefill == "a"
    assert accepted(choice_of(node("a"), avoid=("a",)).decide()).prefill == "a"


def test_a_prompt_that_several_nodes_failed_at_goes_to_its_decode_node_if_that_computes_prompts():
    idle, busy = replace(node("idle"), step_s=9.0), node("busy", 1.0)
    choice = choice_of(idle, busy)
    decision = accepted(choice.decide())
    assert (decision.prefill, decision.decode) == ("idle", "busy")
    alone = choice.on_one_node(decision)
    assert (alone.prefill, alone.decode) == ("busy", "busy")
    assert alone.estimates["wait_s"] == 1.0 and alone.estimates["handover_s"] == 0.0
    assert alone.estimates["ttft_s"] == pytest.approx(1.0 + alone.estimates["prefill_s"])
    choice = choice_of(replace(idle, roles=("prefill",)), replace(busy, roles=("decode",)))
    decision = accepted(choice.decide())
    assert choice.on_one_node(decision) is decision


def test_nodes_too_busy_to_answer_still_count_where_nobody_else_has_their_role():
    prefill, other = replace(node("p"), roles=("prefill",)), replace(node("q"), roles=("prefill",))
    decode = replace(node("d"), roles=("decode",))
    gossiped = View(5.0, [prefill, other, decode], MeasuredLinks(), 256)

    def seen(answered):
        return with_silent(View(5.0, answered, MeasuredLinks(), 256), gossiped).ids

    assert seen([prefill]) == ["p", "d"]
    assert seen([prefill, decode]) == ["p", "d"]
    assert seen([]) == ["p", "q", "d"]


def test_a_node_that_became_busy_sends_the_prompt_away_but_not_for_ever():
    words = Words()
    load = SimpleNamespace(record=lambda: NodeRecord(work_s=3.0), prefill_s=lambda request: 9.0)
    own = OwnLoad("n", load, words, Rejection())
    promise = Promise(claim=7, wait_s=1.0, ttft_s=2.0, redirects_left=1)
    with pytest.raises(RemoteError, match=r"n has 2\.00 s more work") as caught:
        own.keep(promise, None)
    assert caught.value.code == "redirect" and words.arrivals == [7]
    own.keep(replace(promise, redirects_left=0), None)
    own.keep(replace(promise, wait_s=2.5, ttft_s=3.5), None)
    words.outstanding = 2_000_000
    with pytest.raises(RemoteError):
        own.keep(replace(promise, wait_s=2.5, ttft_s=3.5), None)


def test_a_longer_queue_that_computes_the_prompts_prefix_is_not_later():
    load = SimpleNamespace(record=lambda: NodeRecord(work_s=2.0), prefill_s=lambda request: 0.01)
    own = OwnLoad("n", load, Words(), Rejection())
    own.keep(Promise(0, wait_s=0.0, ttft_s=2.0, redirects_left=1), None)
    load.prefill_s = lambda request: 2.0
    with pytest.raises(RemoteError):
        own.keep(Promise(0, wait_s=0.0, ttft_s=2.0, redirects_left=1), None)


def test_refusals_become_what_the_api_answers():
    full = no_placement(Rejected("full", 3.0), [], 0, 0.0).answer()
    assert isinstance(full, Overloaded) and full.retry_after_s == 3.0 and str(full) == "full"
    absent = no_placement(Rejected("no node", None, "decode"), [], 0, 0.0)
    assert isinstance(absent.answer(), Unavailable) and absent.missing_role == "decode"
    long = no_placement(Rejected("too long", None), [], 0, 0.0).answer()
    assert isinstance(long, Unavailable) and long.retry_after_s > absent.answer().retry_after_s


def test_a_refused_request_is_explained_with_its_candidates_and_the_objective_that_failed():
    policy = placement_policy(Config(), random.Random(0))
    view = View(5.0, [node("a", 9.0), node("b", 8.0)], MeasuredLinks(), 256)
    decision = accepted(policy.place(5.0, DEMAND, view, np.zeros(2)))
    estimate = Estimate(
        service_class="interactive", ttft_s=decision.estimates["ttft_s"], wait_s=decision.estimates["wait_s"],
        step_s=0.01, step_soon_s=0.01, step_alone_s=0.01, decode_s=1.0,
    )  # fmt: skip
    refusal = rejections["early"]().at_arrival(estimate)
    probe = ProbeAnswer(Member("a", ("h", 1)), NodeRecord(work_s=9.0).pack(), 0.0, None, 0, 0.001, 0.3, 0.1, 0)
    declined = turned_away(refusal, decision, [probe], 2, 0.002).declined
    told = declined.explain()
    assert [row["node"] for row in told["considered"] if row["stage"] == "prefill"] == ["b", "a"]
    assert told["estimates"]["ttft_s"] == pytest.approx(9.0) and told["probes"][0]["node"] == "a"
    refused = told["refused"]
    assert (refused["objective"], refused["limit_s"], refused["estimated_s"]) == ("ttft", 1.0, pytest.approx(9.0))
    assert refused["retry_after_s"] == 8.0, "when the queue has shrunk so far"
    assert declined.kept().explain() == told


def accepted(decision: Placement | Rejected) -> Placement:
    assert isinstance(decision, Placement)
    return decision


def test_an_explanation_has_the_candidates_the_probes_and_the_claim():
    policy = placement_policy(Config(), random.Random(0))
    view = View(5.0, [node("a"), node("b", 1.0)], MeasuredLinks(), 256)
    decision = accepted(policy.place(5.0, DEMAND, view, np.zeros(2)))
    probe = ProbeAnswer(Member("a", ("h", 1)), NodeRecord(work_s=2.0).pack(), 0.5, None, 0, 0.001, 0.3, 0.1, 0)
    told = Placed(decision, [probe], 2, 0.002, Claim("a", 5, 0, 9.0, one_sided=True)).explain()
    assert [row["node"] for row in told["considered"] if row["stage"] == "prefill"] == ["a", "b"]
    assert told["probes"][0]["gossiped_wait_s"] == 0.3 and told["asked"] == 2
    assert told["probes"][0]["wait_s"] == 2.5, "its queue and what was announced to it"
    assert told["claim"] == {"amount": 5, "one_sided": True}


MINE = """
from sched.placement.rivals import RandomPlacement
class Mine(RandomPlacement):
    def choose_prefill(self, costs, able):
        return able[-1]
class Other:
    pass
"""


def test_a_policy_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    view = View(5.0, [node("a"), node("b", 9.0)], MeasuredLinks(), 256)
    for spec in (f"{file}:Mine", str(file)):
        policy = placement_policy(parse(["--placement", spec]), random.Random(0))
        assert accepted(policy.place(5.0, DEMAND, view, view.none)).prefill == "b"


@pytest.mark.parametrize(("spec", "wrong"), [("mine.py:Other", "it lacks shortlist, place"), ("none.py", "no file")])
def test_a_file_without_a_policy_is_a_usage_error(tmp_path, spec, wrong):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(UsageError, match=f"--placement .*{wrong}"):
        placement_policy(parse(["--placement", str(tmp_path / spec)]), random.Random(0))


@pytest.mark.parametrize("name", ["windserve", "ecoserve", "taichi", "mooncake-cost"])
def test_policies_by_objectives_know_those_of_the_flag(name):
    config = parse(["--placement", name, "--slo", "standard:ttft=0.5,tbt=0.25"])
    known = placement_policy(config, random.Random(0)).classes["standard"]
    assert (known.ttft_s, known.tbt_s) == (0.5, 0.25)


def test_a_path_nobody_used_is_taken_to_be_like_the_others():
    links = MeasuredLinks()
    moved = {"event": "kv_moved", "node": "a", "detail": {"bytes": 1 << 24, "seconds": 0.5}}
    links.learn([moved] * 3, "d")
    (latency, _), (per_byte, other) = links.handover("a", ["d", "e"])
    assert latency + per_byte * (1 << 24) == pytest.approx(0.5, rel=0.01)
    assert other == pytest.approx(per_byte)


def test_a_policy_that_learns_hears_what_became_of_its_placements():
    policy = placement_policy(parse(["--placement", "mooncake-learned"]), random.Random(0))
    estimates = {"wait_s": 0.0, "transfer_s": 0.0, "prefill_s": 1.0, "ttft_s": 1.0}
    for _ in range(40):
        Placer.learn(SimpleNamespace(_policy=policy), "a", estimates, 2.0)
    assert policy.predictor.factor("a") > 1.5
    plain = placement_policy(Config(), random.Random(0))
    Placer.learn(SimpleNamespace(_policy=plain), "a", estimates, 2.0)


class AtSites(Placer):
    """Its site has one node; others join through `up`, and it asks a node by `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.up: list[Callable[[Member], None]] = []
        self._measuring, self._closed = None, False
        self.down: list[Callable[[Member, str], None]] = []
        here = [self.member("a1", "a")]
        self._gossip = SimpleNamespace(me=here[0], members=here, on_up=self.up.append, on_down=self.down.append)
        self._sites = SiteFinder("a", lambda member: self.asked.append(member.node_id))

    @staticmethod
    def member(name: str, site: str, *roles: str) -> Member:
        return Member(name, ("h", 1), roles=roles or MIXED, info={"site": site})

    def join(self, member: Member) -> None:
        self._gossip.members.append(member)
        self.up[0](member)


async def test_the_distance_of_a_site_is_measured_when_it_comes_and_not_when_the_first_request_does(monkeypatch):
    monkeypatch.setattr("engine.front.placing.RETRY_S", 0.001)
    monkeypatch.setattr("engine.sites.finder.RETRY_S", 0.001)
    placer = AtSites()
    placer.start()
    placer.join(placer.member("pool", "b", "store"))
    await asyncio.sleep(0.01)
    assert placer.asked == [], "a node that computes nothing is not asked"
    far = placer.member("b1", "b")
    placer.join(far)
    async with asyncio.timeout(5):
        while len(placer.asked) < 3:  # noqa: ASYNC110 - it does not answer
            await asyncio.sleep(0.001)
        placer._sites.heard(time.monotonic(), far, 0.02)
        await placer._measuring
    assert set(placer.asked) == {"b1"}
    placer.join(placer.member("c1", "c"))
    await asyncio.sleep(0.01)
    assert placer.asked[-1] == "c1"
    placer.close()
    with pytest.raises(asyncio.CancelledError):
        await placer._measuring
    ended = placer._measuring
    placer.join(placer.member("d1", "d"))
    assert placer._measuring is ended, "this node ends"


async def test_a_request_of_a_bound_tenant_is_not_taken_over_from_another_site():
    """Its acceptor was lost, and its client has come to an acceptor here."""
    placer = AtSites()
    for name, site in (("here", "a"), ("there", "b")):
        placer._gossip.members.append(placer.member(name, site))
    everyone = [one.node_id for one in placer._gossip.members]
    asked = list[str]()

    async def call(node: str, *_: object, **options: object) -> None:
        asked.append(node)
        raise RemoteError("not here", "unknown")

    channel = SimpleNamespace(call=call, handle=lambda *_: None, on_lost=lambda _: None, on_closed=lambda _: None)
    attempts = Attempts(channel, placer, SimpleNamespace())
    for bound, nodes in ((False, everyone), (True, [name for name in everyone if name != "there"])):
        asked.clear()
        flight = SimpleNamespace(
            request_id="r", root=bytes(16), token_ids=[1], sampling=SamplingParams(), site_bound=bound
        )
        assert not await attempts.adopt(flight)
        assert asked == nodes


def test_a_load_from_ssd_tells_nothing_about_the_way():
    links = MeasuredLinks()
    before = links.fetch_each(["a"])

    def load(**tiers: int):
        detail = {"bytes": 1 << 24, "seconds": 0.5, "tiers": tiers}
        return [{"event": "prefix_fetched", "node": "a", "detail": detail}] * 3

    links.learn(load(dram=3, ssd=1), "d")
    assert links.fetch_each(["a"]) == before
    links.learn(load(arena=4), "d")
    latency, per_byte = links.fetch_each(["a"])
    assert latency + per_byte * (1 << 24) == pytest.approx(0.5, rel=0.01)


OWN = """
class Own:
    __slots__ = ()
    def __init__(self, limits, rng, threshold): pass
    def shortlist(self, now, demand, view, matched): return ()
    def place(self, now, demand, view, matched): raise NotImplementedError
"""


def test_tolls_are_those_of_the_policy_unless_they_are_switched_off(tmp_path):
    """A user's policy needs none, and may take no attribute."""
    (tmp_path / "own.py").write_text(OWN)
    for flags, tolls in (({}, True), ({"placement_tolls": False}, False), ({"placement": "taichi"}, False)):
        policy = placement_policy(Config(**flags), random.Random(0))
        assert isinstance(policy, TwoStages) and policy.tolls == tolls
    own = placement_policy(Config(placement=f"{tmp_path / 'own.py'}:Own"), random.Random(0))
    assert not isinstance(own, TwoStages) and not hasattr(own, "tolls")
