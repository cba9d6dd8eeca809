"""Asking nodes how busy they are, before one is chosen.

Where the path to a node is one-sided and its cache digest is here, its load word is read without its Python taking
part; otherwise it is asked by a message and answers with its longest prefix too. On one host a message is nearly as
quick as a read of shared memory, so there only nodes that do not prefill, whose prefixes do not matter, are read. The
first question to a node is a message in any case: the answer tells its clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.block import BlockKey
from engine.serving import messages
from engine.serving.clocks import Clocks
from engine.serving.placed import ProbeAnswer
from net.channel import Channel, PeerLost, RemoteError
from net.gossip import Gossip
from net.load_words import LoadWords
from net.shm import boot_id
from net.transfer import TransferEngine
from sched.load_word import CLAIM_UNIT_S, Load
from sched.member import Member
from sched.placements.view import Candidate, View
from sched.record import NodeRecord

PROBE_TIMEOUT_S = 1.0
LAGGARD_S = 0.1
"""Once somebody has answered, the others have so long."""


@dataclass(slots=True)
class Known:
    """Engine nodes with their records, and those alive that gossip has told no load of yet."""

    view: View
    members: list[Member]  # in the order of the view
    strangers: list[Member]
    places: npt.NDArray[np.intp]  # of the view's nodes among the holders of digests; -1 = no digest
    at: float

    def of(self, node_id: str, now: float) -> tuple[float, float] | None:
        """(wait_s, age_s) of a node by gossip."""
        i = self.view.index.get(node_id)
        if i is None:
            return None
        return max(0.0, float(self.view.work_until[i]) - now), self.view.nodes[i].age_s + now - self.at


@dataclass(frozen=True, slots=True)
class Question:
    """What the nodes are asked about."""

    keys: Sequence[BlockKey]
    horizon_s: float  # when the prompt would come to its decode node
    matched: Mapping[str, int]  # leading tokens by node, as the digests tell


class Prober:
    """Of one acceptor. `by_message`: answers must have what only messages tell, the node's own forecast."""

    def __init__(
        self,
        channel: Channel,
        gossip: Gossip,
        transfer: TransferEngine,
        words: LoadWords,
        clocks: Clocks,
        by_message: bool,
    ) -> None:
        self._channel, self._gossip, self._transfer, self._words = channel, gossip, transfer, words
        self._clocks, self._by_message = clocks, by_message
        self._boot_id = boot_id()

    async def ask(self, members: Sequence[Member], question: Question, known: Known) -> dict[str, ProbeAnswer]:
        """By node. Those that do not answer in time are left out: a slow node must not hold up every request."""
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
        records = self._gossip.records
        took = time.monotonic() - begun
        return {
            member.node_id: self._of_word(member, loads[member.node_id], records[member.node_id], question, known, took)
            for member in members
            if member.node_id in loads and member.node_id in records
        }

    def _of_word(
        self, member: Member, load: Load, record: NodeRecord, question: Question, known: Known, took: float
    ) -> ProbeAnswer:
        told = known.of(member.node_id, time.monotonic())
        return ProbeAnswer(
            candidate=Candidate.of(member, load.word.onto(record), load.outstanding * CLAIM_UNIT_S),
            local_tokens=question.matched.get(member.node_id, 0),
            round_trip_s=took,
            gossiped_wait_s=None if told is None else told[0],
            gossip_age_s=None if told is None else told[1],
            claimed=load.claimed,
            one_sided=True,
        )

    # --- by messages

    async def _ask_all(self, members: Sequence[Member], question: Question, known: Known) -> dict[str, ProbeAnswer]:
        pending = {asyncio.ensure_future(self._ask(member, question, known)) for member in members}
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

    async def _ask(self, member: Member, question: Question, known: Known) -> ProbeAnswer | None:
        data = [b"".join(question.keys)] if "prefill" in member.roles else []
        sent, begun = time.time(), time.monotonic()
        body = {"horizon_s": question.horizon_s}
        try:
            reply, _ = await self._channel.call(member.node_id, messages.PROBE, body, data, PROBE_TIMEOUT_S)
        except (PeerLost, RemoteError, TimeoutError):
            return None
        same_host = reply["boot_id"] == self._boot_id
        self._clocks.observe(member.node_id, sent, time.time(), reply["unix_s"], same_host)
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
