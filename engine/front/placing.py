"""From a request to a placement: make a shortlist, ask its nodes, look up the prefix, let the policy decide.

The decision itself is pure (sched/placement/). Gossip names the candidates. The policy chooses the nodes to ask before
the decision, because stale gossip alone would send every acceptor to the same node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cache.block import BlockGeometry, BlockKey
from cache.results import LeadingRun
from engine.front.beyond import BeyondPlacing
from engine.front.claiming.bursts import Bursts
from engine.front.claiming.claims import Claims
from engine.front.clocks import Clocks
from engine.front.cluster import Cluster
from engine.front.declined import no_placement, turned_away
from engine.front.demands import Demands
from engine.front.groups import GroupRules
from engine.front.known import COMPUTES, Known, Neighbours, with_unasked
from engine.front.placed import Placed, ProbeAnswer
from engine.front.probing import Prober, Question
from engine.handoff.leading import leading_run
from engine.sites.finder import RETRY_S, SiteFinder, Wanted
from engine.sites.members import mates
from engine.step.request import Request
from net.loop.tasks import spawn
from sched.admission import retry_after_s
from sched.gossip.intents import WORTH_S, Coming
from sched.membership.member import Member, Rng, Status
from sched.placement.burst import Choice
from sched.placement.choice import LearningPolicy, Placement, PlacementPolicy, Rejected
from sched.placement.costs import horizon_s
from sched.placement.links import Vector
from sched.placement.measured_links import MeasuredLinks
from sched.placement.view import View
from sched.rejection import Estimate, Refusal, Rejection


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How to place requests. `intents`: avoid computing the same prefix on two nodes at the same time; `groups`: when
    several nodes compute a long prompt, None = never; `longest`: prompt + output that this acceptor accepts."""

    policy: PlacementPolicy
    rejection: Rejection
    max_waiting: int
    prefix_caching: bool
    intents: bool
    groups: GroupRules | None = None
    longest: int = 0


class Placer:
    """Places requests for this node's acceptor."""

    def __init__(self, rules: PlacementRules, cluster: Cluster, geometry: BlockGeometry, rng: Rng) -> None:
        gossip = cluster.gossip
        self.links = MeasuredLinks()
        self.clocks = Clocks()
        self._policy = rules.policy
        self._gossip = gossip
        self._store = cluster.store
        self._words = cluster.words
        self._claims = Claims(cluster.words)
        self._geometry = geometry
        self._demands = Demands(geometry)
        self._prefix_caching = rules.prefix_caching
        self._rejection = rules.rejection
        tolls = getattr(rules.policy, "tolls", False)  # files of users need none
        self._neighbours = Neighbours(gossip, self.links, rules.max_waiting, rng, geometry, tolls=tolls)
        self._prober = Prober(cluster, self.clocks, rules.rejection.forecasts, self.links)
        self._sites = SiteFinder(gossip.me.site, self._measure)
        self._bursts = Bursts(cluster.channel, gossip)
        self._intents = rules.intents and rules.prefix_caching
        self._groups = rules.groups
        self._beyond = BeyondPlacing(cluster.channel, gossip, geometry.block_size, rules.longest)
        self._measuring: asyncio.Task[None] | None = None
        self._closed = False
        gossip.on_down(lambda member, reason: self.links.forget(member.node_id))

    def start(self) -> None:
        """Measure the distance of every site that is here or comes, so that the first request can go to it."""
        self._gossip.on_up(lambda member: self._measure_sites())
        self._gossip.on_down(lambda member, reason: self._sites.keep({one.site for one in self._gossip.members}))
        self._measure_sites()

    def close(self) -> None:
        """End what `start` began."""
        self._closed = True
        if self._measuring is not None:
            self._measuring.cancel()

    @property
    def block_size(self) -> int:
        return self._geometry.block_size

    async def place(
        self, request: Request, avoid: Collection[str] = (), new: bool = True, one_node: bool = False
    ) -> Placed:
        """`avoid`: nodes that have sent this prompt away (see Choice); `new`: no node has begun the request yet;
        `one_node`: one node computes the prompt, however long it is, and decodes too if it can. Raises NotPlaced when
        every node is full, a role is missing, the prompt fits on no node, or a new request would miss its objectives.
        """
        self._neighbours.arrivals.count(time.monotonic())
        tried: set[str] = set()
        while (placed := await self._try_to_place(request, avoid, new, one_node, tried)) is None:
            pass  # each time with one site less
        return placed

    async def _try_to_place(
        self, request: Request, avoid: Collection[str], new: bool, one_node: bool, tried: set[str]
    ) -> Placed | None:
        """None: the site that the request should go to is silent, and is now in `tried`; another one can take it."""
        begun = time.monotonic()
        keys = self._keys(request)
        everyone = known = self._neighbours.known(begun)
        if self._beyond.concerns(request, known.view):
            placed = await self._beyond.place(request, keys, begun, avoid)
            return self._charged(placed, everyone, time.monotonic(), request)
        if request.sampling.max_tokens - request.num_output_tokens > 1:
            known = known.continuing(request.num_tokens)
        wide = known
        demand = self._demands.of(request, LeadingRun(0), 0, known.view)
        matched = self._neighbours.matched(known, keys, self.block_size)
        pooled, far = None, False
        if self._sites.several(known.sites):
            pooled = await self._pooled(keys if request.fetches else [])
            wanted = Wanted(self._demands.of(request, pooled, 0, known.view), demand, request.site_bound)
            site, others = self._sites.choose(begun, known.view, known.members, matched, wanted, tried)
            if far := site != self._sites.own:
                pooled = LeadingRun(0)  # the nodes of that site ask its pool
            known = known.at_site(site)
            if matched is not wide.view.none:
                matched = matched[[wide.view.index[node] for node in known.view.ids]]
            else:
                matched = known.view.none
        asked = self._policy.shortlist(begun, demand, known.view, matched)
        members = [known.members[i] for i in asked] + known.strangers
        gossiped = {known.view.ids[i]: int(matched[i]) for i in asked}
        question = Question(keys, horizon_s(begun, demand, known.view), gossiped)
        asking = self._prober.begin(members, question, known)
        try:
            if pooled is None:
                pooled = await self._pooled(keys if request.fetches else [])
            answers = await asking.answers()
        finally:
            asking.stop()
        now = time.monotonic()
        for answer in answers.values():
            self._sites.heard(now, answer.member, answer.round_trip_s)
        if far and asked and not answers and asking.late:
            self._sites.silent(site)
            self._measure_sites()
            if others:
                tried.add(site)
                return None
        view = self._neighbours.answered(now, known, answers, bool(asked))
        held = 0 if matched is known.view.none else int(matched.max(initial=0.0))  # tokens on the best node
        if asked or not known.members:
            matched = _held_tokens(view, answers, gossiped)
            held = max(held, int(matched.max(initial=0.0)))
        if self._neighbours.unlike.any:  # arenas of unlike nodes cannot be read
            held = 0
        choice = Choice(self._policy, now, self._demands.of(request, pooled, held, view), view, matched, avoid)
        decision = choice.decide()
        # A node that has just started has told gossip no load yet, so only its answer says how small its arena is. Few
        # nodes were asked, and the arena of another one may hold the request.
        unsure = isinstance(decision, Rejected) or not known.members
        if unsure and self._beyond.concerns(request, with_unasked(view, known.view)):
            placed = await self._beyond.place(request, keys, begun, avoid)
            return self._charged(placed, everyone, now, request)
        if isinstance(decision, Rejected):
            raise no_placement(decision, list(answers.values()), len(members), time.monotonic() - begun)
        if one_node:
            decision = choice.on_one_node(decision)
        elif not request.scores_prompt and self._groups is not None:
            decision = self._groups.grouped(decision, choice, known, request.fetches)
        if new and (found := refusal(self._rejection, decision, request.service_class, view)) is not None:
            raise turned_away(found, decision, list(answers.values()), len(members), time.monotonic() - begun)
        alone = False
        # What a group computes is on none of its nodes in the end: others do better to find it in the pool.
        shared = decision.estimates["prefill_s"] > WORTH_S and decision.group is None and not one_node
        if self._intents and asked and shared:
            first = decision
            decision = await self._joined(first, choice, question, known, answers)
            alone = decision is first
        claimed = {node: answer.claimed for node, answer in answers.items()}
        claim, given_up = None, 0
        if not one_node:  # which is not decided again
            decision, claim, given_up = await self._claims.secure(decision, choice, claimed)
        if alone and decision.prefill != first.prefill:
            await self._intend(decision, question, known, instead_of=first.prefill)
        seconds = time.monotonic() - begun
        placed = Placed(decision, list(answers.values()), len(members), seconds, claim, given_up, choice.computing)
        return self._charged(placed, everyone, now, request)

    def _measure_sites(self) -> None:
        if not self._closed and (self._measuring is None or self._measuring.done()):
            self._measuring = spawn(self._until_measured(), "measuring the distances of sites")

    async def _until_measured(self) -> None:
        while self._sites.unknown(time.monotonic(), self._computing()):  # noqa: ASYNC110 - some do not answer yet
            await asyncio.sleep(RETRY_S)

    def _computing(self) -> list[Member]:
        """Nodes of all sites that answer questions of acceptors."""
        return [member for member in self._gossip.members if COMPUTES & set(member.roles)]

    def _measure(self, member: Member) -> None:
        """Ask a node of another site in the background, for the distance."""
        spawn(self._round_trip(member), "measuring the distance of a site")

    async def _round_trip(self, member: Member) -> None:
        known = self._neighbours.known(time.monotonic())
        for answer in (await self._prober.ask([member], Question([], 0.0, {}), known)).values():
            self._sites.heard(time.monotonic(), answer.member, answer.round_trip_s)

    def _charged(self, placed: Placed, known: Known, now: float, request: Request) -> Placed:
        for node in placed.placement.prefills:
            self._neighbours.charge(known, now, node, placed.estimates["prefill_s"], request.num_tokens)
        return placed

    async def _joined(
        self, decision: Placement, choice: Choice, question: Question, known: Known, answers: dict[str, ProbeAnswer]
    ) -> Placement:
        """The decision, repeated if another node already computes some of the prompt's new blocks. If that node was
        not asked before, it is asked now."""
        coming = await self._intend(decision, question, known)
        if not coming:
            return decision
        absent = [m for m in known.members if m.node_id in coming and m.node_id not in choice.view.index]
        if absent:
            more = await self._prober.ask(absent, question, known)
            answers |= more
            fresh = self._neighbours.view_of(choice.now, more)
            choice.view = choice.view.joined_with(fresh)
            choice.matched = np.append(choice.matched, _held_tokens(fresh, more, {}))
        choice.expect(coming, self.block_size)
        again = choice.decide()
        return decision if isinstance(again, Rejected) else again

    async def _intend(
        self, decision: Placement, question: Question, known: Known, instead_of: str = ""
    ) -> dict[str, Coming]:
        blocks, ready_s = decision.prefix_tokens // self.block_size, decision.estimates["ttft_s"]
        return await self._bursts.claim(question.keys, blocks, known.ring, decision.prefill, ready_s, instead_of)

    def room(self) -> tuple[int, float]:
        """(requests that may wait for their first token on the nodes known here, Retry-After in seconds if that number
        waits). Each node takes one more than its queue holds. Nodes that have not told their load count like those that
        prefill and decode."""
        now = time.monotonic()
        known = self._neighbours.known(now)
        view = known.view
        nodes = min(int(view.prefills.sum()), int(view.decodes.sum())) + len(known.strangers)
        queues = zip(view.waiting[view.prefills], view.work_until[view.prefills] - now, strict=True)
        retry_s = retry_after_s((int(waiting), float(work_s)) for waiting, work_s in queues)
        return max(1, nodes) * (view.max_waiting + 1), retry_s

    def decode_nodes(self, site_bound: bool = False) -> list[str]:
        """Decode nodes that gossip considers alive; site_bound: only those of this site."""
        members = mates(self._gossip) if site_bound else self._gossip.members
        return [m.node_id for m in members if m.status is Status.ALIVE and "decode" in m.roles]

    def missing_role(self) -> str:
        """A role that no node has, according to gossip; '' if every role has a node. Far cheaper than `place`."""
        view = self._neighbours.known(time.monotonic()).view
        return "prefill" if not view.prefills.any() else "decode" if not view.decodes.any() else ""

    def learn(self, prefill: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """Report the measured time from a decision for node `prefill`, with these estimates, to its first token."""
        if isinstance(self._policy, LearningPolicy):
            self._policy.observed(prefill, estimates, ttft_s)

    def suspects(self, node_id: str) -> bool:
        """Whether gossip considers the node dead or suspects it."""
        member = self._gossip.core.membership.get(node_id)
        return member is None or member.status is not Status.ALIVE

    def unreachable(self, node_id: str) -> None:
        """Report that the node refuses connections or is silent: gossip suspects it until it proves that it lives."""
        self._gossip.suspect(node_id)

    async def release(self, placed: Placed) -> None:
        """Withdraw the claim: the work will not arrive."""
        if placed.claim is not None:
            await self._words.release(placed.claim)

    def _keys(self, request: Request) -> list[BlockKey]:
        """Keys of the reusable prefix. The last token is always computed; a request that scores its prompt computes
        all tokens."""
        if not self._prefix_caching or request.scores_prompt:
            return []
        size = self._geometry.block_size
        return request.block_keys(size)[: (request.num_tokens - 1) // size]

    async def _pooled(self, keys: Sequence[BlockKey]) -> LeadingRun:
        if not keys:
            return LeadingRun(0)
        return await leading_run(self._store, keys, self._geometry.groups, 0, self._geometry.block_size)


def _held_tokens(view: View, answers: Mapping[str, ProbeAnswer], matched: Mapping[str, int]) -> Vector:
    """Leading tokens of the prompt that the nodes of `view` hold: from their answers, otherwise from their digests."""
    tokens = [answers[node].local_tokens if node in answers else matched.get(node, 0) for node in view.ids]
    return np.array(tokens, dtype=np.float64)


def refusal(rejection: Rejection, decision: Placement, service_class: str, view: View) -> Refusal | None:
    """Why --rejection refuses this request; None if it does not."""
    onto = view.index[decision.decode]
    estimate = Estimate(
        service_class=service_class,
        ttft_s=decision.estimates["ttft_s"],
        wait_s=decision.estimates["wait_s"],
        step_s=float(view.step_s[onto]),
        step_soon_s=float(view.step_soon_s[onto]),
        step_alone_s=float(view.step_alone_s[onto]),
        decode_s=float(view.decode_s[onto]),
    )
    return rejection.at_arrival(estimate)
