"""Asks nodes for their load before the policy chooses one.

If the path to a node is one-sided and its cache digest is here, the prober reads the node's load word without running
its Python. Otherwise it sends a message, and the node also answers with its longest cached prefix. On one host a
message is nearly as fast as a read of shared memory. There the prober reads only nodes that do not prefill, because
their prefixes do not matter. The first question to a node is always a message, because the answer carries its clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache.block import BlockKey
from engine.front.clocks import Clocks
from engine.front.cluster import Cluster
from engine.front.known import Known
from engine.front.placed import ProbeAnswer
from engine.handoff import messages
from engine.handoff.messages import Probe, Probed
from net.bodies import answered, encode
from net.channel.channel import PeerLost, RemoteError
from net.loop.tasks import spawn
from net.transfer.shm.transport import boot_id
from sched.gossip.load_word import CLAIM_UNIT_S, Load
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.placement.measured_links import MeasuredLinks

PROBE_TIMEOUT_S = 1.0
LAGGARD_S = 0.1
"""After the first answer, the prober waits this long for the others."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question to the nodes."""

    keys: Sequence[BlockKey]
    horizon_s: float  # time until the prompt would reach its decode node
    matched: Mapping[str, int]  # cached leading tokens by node, from the digests


class Prober:
    """The prober of one acceptor. `by_message`: the policy needs the node's own forecast, which only messages carry.
    `links` gets the rail rates that nodes report."""

    def __init__(
        self,
        cluster: Cluster,
        clocks: Clocks,
        by_message: bool,
        links: MeasuredLinks,
    ) -> None:
        self._channel, self._gossip = cluster.channel, cluster.gossip
        self._transfer, self._words = cluster.transfer, cluster.words
        self._clocks, self._by_message, self._links = clocks, by_message, links
        self._boot_id = boot_id()

    async def ask(self, members: Sequence[Member], question: Question, known: Known) -> dict[str, ProbeAnswer]:
        """Answers by node, without nodes that do not answer in time: a slow node must not delay every request."""
        read = [member for member in members if self._one_sided(member, known)]
        asked = [member for member in members if member not in read]
        for member in asked:
            if not self._by_message:
                self._words.open_soon(member.node_id)  # the next question can be a read
        messages_sent = self._ask_all(asked, question, known)
        if not read:
            return await messages_sent
        answers, loads = await asyncio.gather(messages_sent, self._read_all(read, question, known))
        return answers | loads

    def _one_sided(self, member: Member, known: Known) -> bool:
        i = known.view.index.get(member.node_id)
        if self._by_message or i is None or known.places[i] < 0:
            return False
        if self._gossip.core.digests.holders.state(member.node_id) is None:
            return False
        if not self._transfer.is_one_sided(member.node_id) or not self._clocks.of([member.node_id]):
            return False
        path = self._transfer.path_of(member.node_id)
        return "prefill" not in member.roles or (path is not None and path.transport == "rdma")

    # --- by reading

    async def _read_all(self, members: Sequence[Member], question: Question, known: Known) -> dict[str, ProbeAnswer]:
        begun = time.monotonic()
        loads = await self._words.probe(member.node_id for member in members)
        now = time.monotonic()
        answers = {}
        for member in members:
            record = self._gossip.record(member.node_id)
            if (load := loads.get(member.node_id)) is not None and record is not None:
                answers[member.node_id] = self._of_word(member, load, record, question, known, now - begun)
        return answers

    def _of_word(
        self, member: Member, load: Load, record: NodeRecord, question: Question, known: Known, took: float
    ) -> ProbeAnswer:
        gossiped = known.of(member.node_id, time.monotonic())
        return ProbeAnswer(
            member=member,
            record=load.word.onto(record).pack(),
            claimed_s=load.outstanding * CLAIM_UNIT_S,
            ahead=None,
            local_tokens=question.matched.get(member.node_id, 0),
            round_trip_s=took,
            gossiped_wait_s=None if gossiped is None else gossiped[0],
            gossip_age_s=None if gossiped is None else gossiped[1],
            claimed=load.claimed,
            one_sided=True,
        )

    # --- by messages

    async def _ask_all(self, members: Sequence[Member], question: Question, known: Known) -> dict[str, ProbeAnswer]:
        """Waits for all answers, for at most PROBE_TIMEOUT_S, and for at most LAGGARD_S after the first answer."""
        answers: dict[str, ProbeAnswer] = {}
        if not members:
            return answers
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        timer = loop.call_later(PROBE_TIMEOUT_S, _end, over)
        body = encode(Probe(question.horizon_s, [m.node_id for m in members if "decode" in m.roles]))
        keys = [b"".join(question.keys)]
        open_questions = len(members)

        async def ask(member: Member) -> None:
            nonlocal timer, open_questions
            try:
                answer = await self._ask(member, body, keys, known)
            except Exception:
                _end(over)
                raise
            if answer is not None:
                if not answers:
                    timer.cancel()
                    timer = loop.call_later(LAGGARD_S, _end, over)
                answers[member.node_id] = answer
            open_questions -= 1
            if not open_questions:
                _end(over)

        tasks = [spawn(ask(member), "probe") for member in members]
        try:
            await over
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
        return answers

    async def _ask(self, member: Member, body: dict[str, Any], keys: list[bytes], known: Known) -> ProbeAnswer | None:
        """`body`: the encoded Probe."""
        data = keys if "prefill" in member.roles else []
        self._words.counters["asked_message"] += 1
        sent, begun = time.time(), time.monotonic()
        try:
            reply, _ = await self._channel.call(member.node_id, messages.PROBE, body, data, PROBE_TIMEOUT_S)
            probed = answered(Probed, reply)
        except (PeerLost, RemoteError, TimeoutError):
            return None
        load = probed.load
        same_host = load.boot_id == self._boot_id
        self._clocks.observe(member.node_id, sent, time.time(), load.unix_s, same_host)
        self._links.reported(member.node_id, probed.rates.fetch_bytes_per_s, probed.rates.bytes_per_s)
        gossiped = known.of(member.node_id, begun)
        return ProbeAnswer(
            member=member,
            record=load.record,
            claimed_s=load.outstanding * CLAIM_UNIT_S,
            ahead=(load.step_soon_s, load.step_alone_s, load.decode_s),
            local_tokens=probed.local_tokens,
            round_trip_s=time.monotonic() - begun,
            gossiped_wait_s=None if gossiped is None else gossiped[0],
            gossip_age_s=None if gossiped is None else gossiped[1],
            claimed=load.claimed,
        )


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
