"""The process of a rank on another host than the node's: it joins, gets its share, answers rank 0, and joins again."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.checkpoint.model_source import ModelSource
from engine.experts.joining import LOADING_S, SILENCE_S, VERSION, Joining, Welcome
from engine.experts.loading import fill, telling
from engine.experts.plan import Plan
from engine.experts.pulling import Lender, checksum
from engine.experts.share import Share
from engine.experts.work import COMMIT, COMPUTE, TAKE, Work
from engine.model.model_error import ModelError
from net import bodies
from net.channel.cluster_key import ClusterKey
from net.channel.wire import FrameError, Header
from net.errors import PeerLost, PeerRefused
from net.rounds.frame_socket import FrameSocket
from net.rounds.outpost import Give, Outpost, Take, Told, nothing, unheard, untaken
from net.rounds.rdma import meeting
from net.rounds.rdma.mirror import Mirror
from net.rounds.rdma.rdma_outpost import RdmaOutpost
from net.rounds.rdma.ways import Ways
from net.transfer.common.memory import Region

log = logging.getLogger("mooncake.experts")

AGAIN_S = 1.0
"""Between two tries to connect."""
LOOK_S = 1.0
DEFAULT_WAYS = Ways()
LEAVE_S = 5.0
"""A process that would like to end does so after this time without a message: the node has no work."""


class RemoteWorker:
    """`source`: the model on this host; None: the weights come from the node. `key`: of the cluster. `may_leave` is
    told when `leave` may be called, and when not any more. `ways`: how messages may go. `name`: for the node."""

    def __init__(
        self,
        address: tuple[str, int],
        source: ModelSource | None,
        key: ClusterKey | None,
        may_leave: Callable[[bool], None] = lambda now: None,
        ways: Ways = DEFAULT_WAYS,
        name: str = "",
    ) -> None:
        self._address, self._source, self._key, self._may_leave = address, source, key, may_leave
        self._ways, self._name = ways, name
        self._leaving = False
        self._instance = secrets.token_hex(8)
        self._share: Share | None = None
        self._held: Welcome | None = None  # what the share is used for
        self._experts: dict[tuple[int, int], int] = {}  # in the share, by layer and slot
        self._staged: dict[tuple[int, int], int] = {}  # that it gets

    def run(self) -> None:
        """Until this process has left. Raises PeerRefused if the node refuses it, and ModelError if it cannot load."""
        said = ""
        while not self._leaving:
            try:
                self._serve()
            except PeerLost as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("%s; trying again every %g s", said, AGAIN_S)
            else:
                said = ""
            if not self._leaving:
                time.sleep(AGAIN_S)

    def leave(self) -> None:
        """End when the node does without this rank, which is an added one."""
        self._leaving = True

    def _serve(self) -> None:
        """One connection, until it ends or there is no place."""
        wire = FrameSocket.dial(self._address, None if self._key is None else self._key.ring(), SILENCE_S)
        try:
            fingerprint = "" if self._source is None else self._source.fingerprint
            rank = -1 if self._held is None else self._held.rank
            joining = Joining(VERSION, self._instance, fingerprint, rank, rdma=self._ways.offer(), name=self._name)
            wire.send({"join": bodies.encode(joining)})
            wire.await_for(0.0)  # the node may have to load first
            wire.expect_long()  # a placement has a number for each copy of an expert
            answer = wire.frame().header
            if "refused" in answer:
                if answer.get("again"):
                    log.info("the node has no place for another rank: %s", answer["refused"])
                    return
                raise PeerRefused(str(answer["refused"]))
            welcome = bodies.decode(Welcome, answer.get("welcome"))
            try:
                share = self._filled(wire, welcome)
            except (ModelError, ValueError) as error:
                wire.send({"failed": str(error)})
                raise ModelError(str(error)) from error
            lender = Lender(welcome, share, self._experts)
            take = partial(self._take, welcome.plan, share)
            outpost, way = settle(wire, welcome, self._ways, take, give=lender.give)
            log.info("rank %d of the experts of the node at %s:%d, %s", welcome.rank, *self._address, way)
            with outpost:
                self._may_leave(welcome.added)
                self._answer(outpost, Work(outpost.desk, welcome.rank, {welcome.rank: share}), lender)
                log.warning("the connection to the node has ended: %s", outpost.ended or "the node has no work")
        except bodies.BodyError as error:
            raise PeerLost(f"the node does not speak as a rank expects: {error}") from None
        finally:
            self._may_leave(False)
            wire.close()

    def _answer(self, outpost: Outpost, work: Work, lender: Lender) -> None:
        """Until the connection has ended, or this process leaves. Raises PeerLost for an expert that is damaged."""
        until, told = math.inf, False
        while outpost.ended is None and time.monotonic() < until:
            if (message := outpost.next_message(LOOK_S)) is not None:
                self._do(message.head, work, lender)
                outpost.answered(message)
            if not self._leaving or (told and message is None):
                continue
            until = time.monotonic() + LEAVE_S
            if not told:
                told = True
                outpost.leave()

    def _do(self, head: list[int], work: Work, lender: Lender) -> None:
        if head[0] == COMPUTE:
            work.do(head)
            return
        if head[0] == TAKE:
            lender.check(head[1], head[4], head[5], head[7])
        with lender.changing:
            work.do(head)
            self._note(head)

    def _filled(self, wire: FrameSocket, welcome: Welcome) -> Share:
        """The share that `welcome` asks for; the one that is here if it is the same. Raises ModelError, PeerLost."""
        duty = welcome.duty
        wanted = {(layer, slot): expert for layer, slot, expert in duty.experts}
        held = self._held
        known = held is not None and (held.fingerprint, held.plan) == (welcome.fingerprint, welcome.plan)
        if self._share is not None and known and self._experts == wanted:
            self._held = welcome
            return self._share
        self._share = self._held = None  # frees the memory of another one
        share = new_share(wire, welcome, self._source, lambda: wire.send({"loading": True}))
        self._share, self._held, self._experts = share, welcome, wanted
        return share

    def _take(self, plan: Plan, share: Share, head: list[int], nbytes: int) -> Sequence[memoryview]:
        """Memory for an expert that the node sends while it serves."""
        kind, layer, _, _, slot, expert, first = [*head, 0, 0, 0][:7]
        there = 0 <= layer < len(plan.layers) and 0 <= slot < plan.slots and 0 <= expert < plan.num_experts
        if kind != TAKE or not there or nbytes != plan.expert_elements * plan.layout.item_bytes:
            raise FrameError(f"{nbytes} bytes are no expert of this rank")
        if first:
            share.drop_staged()
        return share.room(layer, slot)

    def _note(self, head: list[int]) -> None:
        """Which experts the share has."""
        if head[0] == TAKE:
            layer, slot, expert, first = head[1], *head[4:7]
            if first:
                self._staged.clear()
            self._staged[layer, slot] = expert
        elif head[0] == COMMIT:
            self._experts |= self._staged
            self._staged.clear()


def settle(
    wire: FrameSocket,
    welcome: Welcome,
    ways: Ways,
    take: Take = untaken,
    told: Told = unheard,
    give: Give = nothing,
) -> tuple[Outpost, str]:
    """Say that this process is ready, and agree with the node on the way of messages: an outpost for it, and the way in
    words. `take`, `told`, `give`: as Outpost has it. Raises PeerLost."""
    layout = welcome.plan.layout
    way: Mirror | str = welcome.why_tcp
    if welcome.device:
        if welcome.device not in ways.offer().rails:  # a node does not choose what this process did not offer
            raise PeerLost(f"the node asks for RDMA device {welcome.device}, which was not offered")
        way = meeting.opened(welcome.device, ways.gid_index, layout)
        wire.send({"ready": True} | meeting.told(way))
        wire.await_for(SILENCE_S)
        way = meeting.answer(wire, way)
    else:
        wire.send({"ready": True})
    if isinstance(way, Mirror):
        return RdmaOutpost(wire, layout, way, take, told, give), f"RDMA over {way.device}"
    if ways.transport == "rdma":
        raise PeerLost(f"--transport rdma: {way}")
    return Outpost(wire, layout, take, told, give), f"TCP; no RDMA: {way}"


def new_share(wire: FrameSocket, welcome: Welcome, source: ModelSource | None, tell: Callable[[], None]) -> Share:
    """With the experts that `welcome` asks for, from `source`, or from the node at the other end. `tell` is called from
    time to time. Raises ModelError, PeerLost."""
    duty = welcome.duty
    share = Share(Region.private("experts", duty.plan.share_bytes), duty.plan)
    if source is None:
        _pull(wire, welcome, share)
    else:
        fill(duty, source, {duty.rank: share}, progress=telling(tell))
    return share


def _pull(wire: FrameSocket, welcome: Welcome, share: Share) -> None:
    """All experts of the share from the node. Raises PeerLost."""

    def place(header: Header, nbytes: int) -> Sequence[memoryview]:
        views = share.bytes_of(*wanted)
        if header.get("expert") != list(wanted) or nbytes != sum(map(len, views)):
            raise FrameError(f"{nbytes} bytes are not the expert that was asked for")
        return views

    wire.trust(place)
    wire.await_for(LOADING_S)  # the share of other nodes waits for this one
    for layer, slot, expert in welcome.duty.experts:
        wanted = layer, slot
        wire.send({"want": [layer, slot]})
        if "expert" not in (header := wire.frame().header):
            raise PeerLost("the node sent something else than an expert")
        if header.get("sum") != checksum(welcome.fingerprint, layer, expert, share.bytes_of(layer, slot)):
            raise PeerLost(f"expert {expert} of layer {layer} came damaged")


def limit_threads(count: int) -> None:
    """Of the products of this process."""
    torch.set_num_threads(count)
    torch.set_grad_enabled(False)
