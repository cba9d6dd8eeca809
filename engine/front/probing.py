"""Asks nodes for their load before the policy chooses one.

If the path to a node is one-sided and its cache digest is here, the prober reads the node's load word without running
its Python. Otherwise it sends a message, and the node also answers with its longest cached prefix. On one host a
message is nearly as fast as a read of shared memory. There the prober reads only nodes that do not prefill, because
their prefixes do not matter. The first question to a node is always a message, because the answer carries its clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cache.block import BlockKey
from engine.front.clocks import Clocks
from engine.front.cluster import Cluster
from engine.front.known import Known
from engine.front.placed import ProbeAnswer
from engine.handoff.messages import PROBE, Probe, Probed
from net.bodies import answered, encode
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.channel.wire import Frame
from net.loop.tasks import awaited
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
        return await self.begin(members, question, known).answers()

    def begin(self, members: Sequence[Member], question: Question, known: Known) -> Asking:
        """Ask now and get the answers later; the caller must await `answers` or call `stop`."""
        read = [member for member in members if self._one_sided(member, known)]
        asked = [member for member in members if member not in read] if read else members
        if not self._by_message:
            for member in asked:
                self._words.open_soon(member.node_id)  # the next question can be a read
        reading = awaited(self._read_all(read, question, known)) if read else None
        asking = Asking(known, self._heard, reading)
        if asked:
            self._words.counters["asked_message"] += len(asked)
            body = encode(Probe(question.horizon_s, [m.node_id for m in asked if "decode" in m.roles]))
            keys = [b"".join(question.keys)]
            asking.send(self._channel, [(member, body, keys if "prefill" in member.roles else ()) for member in asked])
        return asking

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

    def _heard(self, member: Member, probed: Probed, known: Known, sent: float, begun: float) -> ProbeAnswer:
        """`sent`: in unix seconds, `begun`: on the monotonic clock."""
        load = probed.load
        same_host = load.boot_id == self._boot_id
        self._clocks.observe(member.node_id, sent, time.time(), load.unix_s, same_host)
        rates = probed.rates
        converts = rates.converted_bytes_per_s
        self._links.reported(member.node_id, rates.fetch_bytes_per_s, rates.bytes_per_s, converts)
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


Heard = Callable[[Member, Probed, Known, float, float], ProbeAnswer]


class Asking:
    """The open questions of one request. It waits for all answers, for at most PROBE_TIMEOUT_S, and for at most
    LAGGARD_S after the first answer."""

    def __init__(self, known: Known, heard: Heard, reading: asyncio.Task[dict[str, ProbeAnswer]] | None) -> None:
        self._known, self._heard, self._reading = known, heard, reading
        self._answers: dict[str, ProbeAnswer] = {}
        self._open: set[asyncio.Future[Frame]] = set()
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = self._begun = 0.0
        self.late = False  # a node said nothing in time, not even that it cannot answer

    def send(self, channel: Channel, questions: Sequence[tuple[Member, dict[str, Any], Sequence[bytes]]]) -> None:
        """Ask each member with this body and data."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._timer = loop.call_later(PROBE_TIMEOUT_S, self._end)
        self._sent, self._begun = time.time(), time.monotonic()
        for member, body, data in questions:
            answer = channel.ask(member.node_id, PROBE, body, data)
            self._open.add(answer)
            answer.add_done_callback(partial(self._answered, member))

    async def answers(self) -> dict[str, ProbeAnswer]:
        """By node."""
        try:
            if self._over is not None:
                await self._over
                self.late = bool(self._open)
            return self._answers if self._reading is None else self._answers | await self._reading
        finally:
            self.stop()

    def stop(self) -> None:
        """Wait for no further answer."""
        self._end()
        if self._reading is not None and not self._reading.cancel() and not self._reading.cancelled():
            self._reading.exception()  # it has ended; perhaps no caller asked for its result
        for answer in self._open:
            answer.cancel()

    def _answered(self, member: Member, answer: asyncio.Future[Frame]) -> None:
        self._open.discard(answer)
        if answer.cancelled():
            return
        if self._over is None or self._over.done():  # too late: a decision is being made with the others
            answer.exception()
            return
        try:
            probed = answered(Probed, answer.result().header["b"])
            found = self._heard(member, probed, self._known, self._sent, self._begun)
        except (PeerLost, PeerRefused, RemoteError):
            found = None
        except Exception:
            self._end()
            raise
        if found is not None:
            if not self._answers and self._timer is not None:
                self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(LAGGARD_S, self._end)
            self._answers[member.node_id] = found
        if not self._open:
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
