"""From a request to a placement: shortlist, ask, look the prefix up in the pool, let the policy decide.

The decision itself is pure and lives in sched/placements/. Gossip names the candidates; whom to ask before the choice
is the policy's to say, because acting on what was gossiped a while ago sends every acceptor to the same node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cache.block import BlockGeometry, BlockKey
from cache.store import Store
from engine.request import Request
from engine.serving import messages
from engine.serving.claims import Claims, accepted
from engine.serving.clocks import Clocks
from engine.serving.measured_links import MeasuredLinks
from engine.serving.placed import Placed, ProbeAnswer
from net.channel import Channel, PeerLost, RemoteError
from net.gossip import Gossip
from net.http.frontend import Overloaded
from net.load_words import LoadWords
from net.shm import boot_id
from sched.load_word import CLAIM_UNIT_S, DRAINING
from sched.member import Member, Status
from sched.placements.arrivals import ArrivalRate
from sched.placements.choice import Placement, PlacementPolicy
from sched.placements.costs import prefill_costs
from sched.placements.demand import Demand
from sched.placements.view import Candidate, View
from sched.rejection import Estimate, Rejection
from sched.state import NodeRecord

PROBE_TIMEOUT_S = 1.0
LAGGARD_S = 0.1
"""Once somebody has answered, the others have so long."""

MOST_STRANGERS = 4
VIEW_S, VIEW_PER_NODE_S = 0.02, 2e-4
"""A view serves the decisions of so long, what those add is charged to it; building it costs some 20 us a node."""


@dataclass(slots=True)
class Known:
    """Engine nodes with their records, and those alive that gossip has told no load of yet."""

    view: View
    members: list[Member]  # in the order of the view
    strangers: list[Member]
    at: float

    def of(self, node_id: str, now: float) -> tuple[float, float] | None:
        """(wait_s, age_s) of a node by gossip."""
        i = self.view.index.get(node_id)
        if i is None:
            return None
        return max(0.0, float(self.view.work_until[i]) - now), self.view.nodes[i].age_s + now - self.at


class Placer:
    """Places requests for this node's acceptor."""

    def __init__(
        self,
        policy: PlacementPolicy,
        channel: Channel,
        gossip: Gossip,
        store: Store,
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
        self._channel = channel
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
        self._boot_id = boot_id()

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
        asked = self._policy.shortlist(begun, demand, known.view, known.view.none)
        members = [known.members[i] for i in asked] + known.strangers[:MOST_STRANGERS]
        horizon_s = prefill_costs(begun, demand, known.view, known.view.none, 1.0).soonest_s()
        pool_tokens, answers = await asyncio.gather(
            self._pool_tokens(keys), self._probe_all(members, keys, horizon_s, known)
        )
        now = time.monotonic()
        view = self._answered(now, known, answers, bool(asked))
        for node in avoid:
            view.close(node)
        matched = np.array([float(answers[node].local_tokens) if node in answers else 0.0 for node in view.ids])
        decide = partial(self._policy.place, now, self._demand(request, pool_tokens), view, matched)
        decision = accepted(decide())
        if new:
            self._admit(decision, request.service_class, view)
        claimed = {node: answer.claimed for node, answer in answers.items()}
        decision, claim, given_up = await self._claims.secure(decision, decide, view, now, claimed)
        placed = Placed(decision, list(answers.values()), len(members), time.monotonic() - begun, claim, given_up)
        for charged in (known.view, self._known.view if self._known else known.view):
            charged.charge(now, decision.prefill, decision.estimates["prefill_s"], request.num_tokens)
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
        """Keys of the prefix worth having: the last token is always computed."""
        if not self._prefix_caching:
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
        self._known = Known(view, members, strangers, now)
        return self._known

    def _answered(self, now: float, known: Known, answers: dict[str, ProbeAnswer], asked: bool) -> View:
        """A view of those that answered; of everybody when nobody was asked, with the strangers that did."""
        fresh, aged = [answer.candidate for answer in answers.values()], self._aged(now, known)
        fresh = with_silent(fresh, aged) if asked else [*aged, *fresh]
        return View(now, fresh, self.links, self._max_waiting)

    def _aged(self, now: float, known: Known) -> list[Candidate]:
        records = self._gossip.records
        return [Candidate.of(m, records[m.node_id]) for m in known.members if m.node_id in records]

    async def _probe_all(
        self, members: Sequence[Member], keys: Sequence[BlockKey], horizon_s: float, known: Known
    ) -> dict[str, ProbeAnswer]:
        """By node. Those that do not answer in time are left out: a slow node must not hold up every request."""
        pending = {asyncio.ensure_future(self._probe(member, keys, horizon_s, known)) for member in members}
        answers: dict[str, ProbeAnswer] = {}
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        try:
            while pending and (left := deadline - time.monotonic()) > 0:
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for answer in (task.result() for task in done):
                    if answer is not None:
                        answers[answer.candidate.node_id] = answer
                        deadline = min(deadline, time.monotonic() + LAGGARD_S)
        finally:
            for task in pending:
                task.cancel()
        return answers

    async def _probe(
        self, member: Member, keys: Sequence[BlockKey], horizon_s: float, known: Known
    ) -> ProbeAnswer | None:
        data = [b"".join(keys)] if "prefill" in member.roles else []
        sent, begun = time.time(), time.monotonic()
        try:
            reply, _ = await self._channel.call(
                member.node_id, messages.PROBE, {"horizon_s": horizon_s}, data, PROBE_TIMEOUT_S
            )
        except (PeerLost, RemoteError, TimeoutError):
            return None
        self.clocks.observe(member.node_id, sent, time.time(), reply["unix_s"], reply["boot_id"] == self._boot_id)
        record = NodeRecord.unpack(bytes.fromhex(reply["record"]))
        ahead = (reply["step_soon_s"], reply["step_alone_s"], reply["decode_s"])
        told = known.of(member.node_id, begun)
        return ProbeAnswer(
            candidate=Candidate.of(member, record, reply["outstanding"] * CLAIM_UNIT_S, ahead),
            local_tokens=reply["local_tokens"],
            round_trip_s=time.monotonic() - begun,
            gossiped_wait_s=None if told is None else told[0],
            gossip_age_s=None if told is None else told[1],
            claimed=reply["claimed"],
        )


def with_silent(answered: Sequence[Candidate], gossiped: Sequence[Candidate]) -> list[Candidate]:
    """Busy is not gone: where all nodes of a role were too slow to answer, what gossip told of them counts."""
    heard = {role for candidate in answered for role in candidate.roles}
    known = {candidate.node_id for candidate in answered}
    return [*answered, *(c for c in gossiped if c.node_id not in known and not heard.issuperset(c.roles))]
