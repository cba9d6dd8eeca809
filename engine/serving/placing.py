"""From a request to a placement: shortlist, ask, look the prefix up in the pool, let the policy decide.

The decision itself is pure and lives in sched/placements/. Gossip names the candidates; whom to ask before the choice
is the policy's to say, because acting on what was gossiped a while ago sends every acceptor to the same node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from cache.block import BlockGeometry, BlockKey
from cache.store import Store
from engine.request import Request
from engine.serving.claims import Claims, accepted
from engine.serving.clocks import Clocks
from engine.serving.measured_links import MeasuredLinks
from engine.serving.placed import Placed, ProbeAnswer
from engine.serving.probing import Known, Prober, Question
from net.channel import Channel
from net.gossip import Gossip
from net.http.frontend import Overloaded
from net.load_words import LoadWords
from net.transfer import TransferEngine
from sched.load_word import DRAINING
from sched.member import Status
from sched.placements.arrivals import ArrivalRate
from sched.placements.choice import Placement, PlacementPolicy
from sched.placements.costs import prefill_costs
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.match import Matcher
from sched.placements.view import Candidate, View
from sched.rejection import Estimate, Rejection

MOST_STRANGERS = 4
VIEW_S, VIEW_PER_NODE_S = 0.02, 2e-4
"""A view serves the decisions of so long, what those add is charged to it; building it costs some 20 us a node."""


class Placer:
    """Places requests for this node's acceptor."""

    def __init__(
        self,
        policy: PlacementPolicy,
        channel: Channel,
        gossip: Gossip,
        store: Store,
        transfer: TransferEngine,
        words: LoadWords,
        geometry: BlockGeometry,
        prefix_caching: bool,
        max_waiting: int,
        rejection: Rejection,
        slo_scale: float,
    ) -> None:
        self.links = MeasuredLinks()
        self.clocks = Clocks()
        self._policy = policy
        self._gossip = gossip
        self._store = store
        self._words = words
        self._claims = Claims(words)
        self._geometry = geometry
        self._prefix_caching = prefix_caching
        self._max_waiting = max_waiting
        self._rejection, self._slo_scale = rejection, slo_scale
        self._arrivals = ArrivalRate()
        self._known: Known | None = None
        self._prober = Prober(channel, gossip, transfer, words, self.clocks, rejection.forecasts)
        self._matcher = Matcher(lambda: gossip.core.digests.holders)

    @property
    def block_size(self) -> int:
        return self._geometry.block_size

    async def place(self, request: Request, avoid: Collection[str] = (), new: bool = True) -> Placed:
        """`avoid`: nodes that have sent this prompt away; `new`: its client has been promised nothing. Raises
        Overloaded when every node is full or a new request would miss its objectives, Unavailable when a role is
        missing or the prompt fits nowhere."""
        begun = time.monotonic()
        self._arrivals.count(begun)
        keys = self._keys(request)
        known = self._now_known(begun)
        demand = self._demand(request, 0)
        matched = self._matched(known, keys)
        asked = self._policy.shortlist(begun, demand, known.view, matched)
        members = [known.members[i] for i in asked] + known.strangers[:MOST_STRANGERS]
        horizon_s = prefill_costs(begun, demand, known.view, known.view.none, 1.0).soonest_s()
        question = Question(keys, horizon_s, {known.view.ids[i]: int(matched[i]) for i in asked})
        pool_tokens, answers = await asyncio.gather(self._pool_tokens(keys), self._prober.ask(members, question, known))
        now = time.monotonic()
        view, heard = self._answered(now, known, answers, bool(asked))
        for node in avoid:
            view.close(node)
        if heard:
            told = [
                answers[node].local_tokens if node in answers else question.matched.get(node, 0) for node in view.ids
            ]
            matched = np.array(told, dtype=np.float64)
        decide = partial(self._policy.place, now, self._demand(request, pool_tokens), view, matched)
        decision = accepted(decide())
        if new:
            self._admit(decision, request.service_class, view)
        claimed = {node: answer.claimed for node, answer in answers.items()}
        decision, claim, given_up = await self._claims.secure(decision, decide, view, now, claimed)
        placed = Placed(decision, list(answers.values()), len(members), time.monotonic() - begun, claim, given_up)
        newest = known if self._known is None else self._known
        for view in [known.view] if newest is known else [known.view, newest.view]:
            view.charge(now, decision.prefill, decision.estimates["prefill_s"], request.num_tokens)
        self._gossip.view.charge(decision.prefill, decision.estimates["prefill_s"])
        return placed

    def _admit(self, decision: Placement, service_class: str, view: View) -> None:
        """Raises Overloaded when --rejection turns such a request away."""
        onto = view.nodes[view.index[decision.decode]]
        estimate = Estimate(
            service_class=service_class,
            ttft_s=decision.estimates["ttft_s"],
            wait_s=decision.estimates["wait_s"],
            step_s=onto.step_s,
            step_soon_s=onto.step_soon_s,
            step_alone_s=onto.step_alone_s,
            decode_s=onto.decode_s,
        )
        refusal = self._rejection.at_arrival(estimate, self._slo_scale)
        if refusal is not None:
            raise Overloaded(refusal.reason, refusal.retry_after_s)

    def decode_nodes(self) -> list[str]:
        """Alive, as gossip has them."""
        members = self._gossip.members
        return [m.node_id for m in members if m.status is Status.ALIVE and "decode" in m.roles]

    def suspects(self, node_id: str) -> bool:
        """Whether gossip holds the node for dead or soon to be."""
        member = self._gossip.core.membership.get(node_id)
        return member is None or member.status is not Status.ALIVE

    async def release(self, placed: Placed) -> None:
        """The work does not come after all."""
        if placed.claim is not None:
            await self._words.release(placed.claim)

    def _demand(self, request: Request, pool_tokens: int) -> Demand:
        return Demand(
            num_tokens=request.num_tokens,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            pool_tokens=pool_tokens,
            block_size=self._geometry.block_size,
            token_bytes=self._geometry.token_bytes,
            service_class=request.service_class,
        )

    def _keys(self, request: Request) -> list[BlockKey]:
        """Keys of the prefix worth having: the last token is always computed, and all of them for their logits."""
        if not self._prefix_caching or request.scores_prompt:
            return []
        size = self._geometry.block_size
        return request.block_keys(size)[: (request.num_tokens - 1) // size]

    async def _pool_tokens(self, keys: Sequence[BlockKey]) -> int:
        return await self._store.lookup(keys) * self._geometry.block_size if keys else 0

    # --- whom we know, and what they answer

    def _now_known(self, now: float) -> Known:
        """Engine nodes as gossip has them. Those still loading their model have no blocks: they are strangers."""
        if self._known is not None and now - self._known.at < VIEW_S + VIEW_PER_NODE_S * len(self._known.members):
            return self._known
        records = self._gossip.records
        members, strangers, candidates = [], [], []
        for member in self._gossip.members:
            if member.status is not Status.ALIVE or not {"prefill", "decode"} & set(member.roles):
                continue
            record = records.get(member.node_id)
            if record is not None and record.flags & DRAINING:
                continue
            if record is None or not record.blocks_total:
                strangers.append(member)
            else:
                members.append(member)
                candidates.append(Candidate.of(member, record))
        ages = [candidate.age_s for candidate in candidates]
        expected = self._arrivals.per_s(now) * len(members) * (sum(ages) / len(ages) if ages else 0.0)
        view = View(now, candidates, self.links, self._max_waiting, expected)
        holders = self._gossip.core.digests.holders
        indices = [holders.index(member.node_id) for member in members]
        places = np.array([-1 if index is None else index for index in indices], dtype=np.intp)
        self._known = Known(view, members, strangers, places, now)
        return self._known

    def _answered(self, now: float, known: Known, answers: dict[str, ProbeAnswer], asked: bool) -> tuple[View, bool]:
        """A view of those that answered, and True; of everybody by gossip when the policy asks nobody."""
        if not asked and known.members:
            return known.view.copy(), False
        records = self._gossip.records
        aged = [Candidate.of(m, records[m.node_id]) for m in known.members if m.node_id in records]
        fresh = with_silent([answer.candidate for answer in answers.values()], aged)
        return View(now, fresh, self.links, self._max_waiting), True

    def _matched(self, known: Known, keys: Sequence[BlockKey]) -> Vector:
        """Leading tokens that each node of the view holds, as far as their digests tell."""
        if not keys:
            return known.view.none
        depths = self._matcher.depths(keys, self._geometry.block_size)
        matched: Vector = np.append(depths, 0.0)[known.places]
        return matched


def with_silent(answered: Sequence[Candidate], gossiped: Sequence[Candidate]) -> list[Candidate]:
    """Busy is not gone: where all nodes of a role were too slow to answer, what gossip told of them counts."""
    heard = {role for candidate in answered for role in candidate.roles}
    known = {candidate.node_id for candidate in answered}
    return [*answered, *(c for c in gossiped if c.node_id not in known and not heard.issuperset(c.roles))]
