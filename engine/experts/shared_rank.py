"""The process of a rank that several nodes share: it answers each of them, and goes on when one is lost.

Every node has a thread here, which connects, and again when the connection has ended. The first node says which experts
the rank has; the others must say the same. The threads answer in turns, so that each node gets the same share of the
work. Nodes tell where the others are.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

from engine.checkpoint.model_source import ModelSource
from engine.experts.joining import SILENCE_S, VERSION, Joining, Welcome
from engine.experts.loading import TELL_S
from engine.experts.pulling import Lender
from engine.experts.remote_worker import AGAIN_S, DEFAULT_WAYS, LOOK_S, limit_threads, new_share, settle
from engine.experts.share import Share
from engine.experts.work import COMPUTE, Work
from engine.model.model_error import ModelError
from net import bodies
from net.channel.cluster_key import ClusterKey
from net.errors import PeerLost, PeerRefused
from net.rounds.asking_nodes import AskingNodes
from net.rounds.desk import Message
from net.rounds.door import parsed
from net.rounds.frame_socket import FrameSocket
from net.rounds.near import reach, take
from net.rounds.near_outpost import NearOutpost
from net.rounds.outpost import Outpost
from net.rounds.rdma.ways import Ways
from net.rounds.turns import Turns
from net.transfer.shm.transport import boot_id

log = logging.getLogger("mooncake.experts")

REFUSED_AGAIN_S = 30.0
"""Before a node is asked again that has refused this process, while others have it."""


class SharedRank:
    """Rank `rank` of every node. `nodes`: HOST:PORT of some, always tried. `source`: the model on this host; None: the
    weights come from a node. `key`: of the cluster. `threads`: of the products. `ways`: how messages may go."""

    def __init__(
        self,
        rank: int,
        nodes: Sequence[str],
        source: ModelSource | None,
        key: ClusterKey | None,
        threads: int,
        ways: Ways = DEFAULT_WAYS,
    ) -> None:
        self._rank, self._source, self._key, self._threads, self._ways = rank, source, key, threads, ways
        self._instance = secrets.token_hex(8)
        self._turns = Turns()
        self._changed = threading.Condition()  # guards all up to _error
        self._nodes = AskingNodes(nodes)
        self._visited: set[str] = set()
        self._served = 0  # nodes that have this process now
        self._welcomed = False
        self._refused: set[str] = set()  # nodes, until they have this process
        self._error: Exception | None = None
        self._loading = threading.Lock()  # of the share and what it is
        self._share: Share | None = None
        self._held: Welcome | None = None

    def run(self) -> None:
        """Without end. Raises PeerRefused if all nodes refuse this process and none has had it, and ModelError if it
        cannot load."""
        while True:
            with self._changed:
                for where in sorted(self._nodes.wanted - self._visited):
                    self._visited.add(where)
                    threading.Thread(target=self._visit, args=(where,), name=f"node {where}", daemon=True).start()
                if self._error is not None:
                    raise self._error
                self._changed.wait()

    # --- one node

    def _visit(self, where: str) -> None:
        """As long as the node is wanted."""
        limit_threads(self._threads)
        said = ""
        while self._is_wanted(where):
            again_s = AGAIN_S
            try:
                why, level = self._serve(where) or "", logging.INFO
            except OSError as error:  # also of this host: too many files are open, or there is no memory
                why, level = str(error), logging.WARNING
                if isinstance(error, PeerRefused):
                    if self._is_unwelcome(where):
                        self._end(error)
                        return
                    again_s = REFUSED_AGAIN_S
            except Exception as error:  # a process that no longer tries looks as if it waited
                self._end(error)
                return
            if why and why != said:
                log.log(level, "the node at %s: %s; trying again every %g s", where, why, again_s)
            said = why
            time.sleep(again_s)

    def _is_wanted(self, where: str) -> bool:
        with self._changed:
            if where in self._nodes.wanted:
                return True
            self._visited.discard(where)
            log.info("the node at %s is gone", where)
            return False

    def _is_unwelcome(self, where: str) -> bool:
        """Whether all nodes refuse this process, after this one does, and none has had it."""
        with self._changed:
            self._refused.add(where)
            return not self._welcomed and self._refused >= self._nodes.wanted

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _told(self, by: str, nodes: Sequence[str]) -> None:
        with self._changed:
            self._nodes.told(by, nodes)
            self._changed.notify_all()

    def _serve(self, where: str) -> str | None:
        """One connection, until it ends; why not, if there is no place. Raises OSError (PeerLost, PeerRefused among
        them), ModelError."""
        wire = FrameSocket.dial(parsed(where), None if self._key is None else self._key.ring(), SILENCE_S)
        try:
            fingerprint = "" if self._source is None else self._source.fingerprint
            # A node that is reached at two addresses gives a place to one of them, and must not take the second for
            # this process come again.
            instance = f"{self._instance}@{where}"
            joining = Joining(VERSION, instance, fingerprint, self._rank, True, _boot(), self._ways.offer())
            wire.send({"join": bodies.encode(joining)})
            wire.await_for(0.0)  # the node may have to load first
            wire.expect_long()  # a placement has a number for each copy of an expert
            answer = wire.frame().header
            if "refused" in answer:
                if answer.get("again"):
                    return str(answer["refused"])
                raise PeerRefused(str(answer["refused"]))
            welcome = bodies.decode(Welcome, answer.get("welcome"))
            if welcome.rank != self._rank:
                raise PeerLost(f"it takes this process for rank {welcome.rank}")
            with (reach(welcome.near) if welcome.near else None) or nullcontext() as near:
                if near is None and welcome.only_near:
                    raise PeerRefused(welcome.only_near)
                with self._changed:
                    self._refused.discard(where)
                with self._holding(wire, welcome) as share:
                    self._answer(wire, where, welcome, share, near)
            return None
        except bodies.BodyError as error:
            raise PeerLost(f"the node does not speak as a rank expects: {error}") from None
        finally:
            wire.close()

    @contextmanager
    def _holding(self, wire: FrameSocket, welcome: Welcome) -> Iterator[Share]:
        """Inside, the share stays. Raises PeerLost, PeerRefused, ModelError."""
        while not self._loading.acquire(timeout=TELL_S):  # another thread fills it
            wire.send({"loading": True})
        try:
            share = self._filled(wire, welcome)
            with self._changed:
                self._welcomed = True
                self._served += 1
        except (ModelError, ValueError, PeerRefused) as error:
            wire.send({"failed": str(error)})
            raise error if isinstance(error, PeerRefused) else ModelError(str(error)) from error
        finally:
            self._loading.release()
        try:
            yield share
        finally:
            with self._changed:
                self._served -= 1

    def _filled(self, wire: FrameSocket, welcome: Welcome) -> Share:
        """With what the node asks for."""
        if self._share is not None and self._held is not None and _same(self._held, welcome):
            return self._share
        if self._served:
            raise PeerRefused(
                f"rank {self._rank} serves nodes that have other experts there: give all the same --dtype, "
                "--expert-parallel-size, --expert-replicas and --num-redundant-experts"
            )
        self._share = self._held = None  # frees the memory of another one

        def tell() -> None:
            with suppress(PeerLost):  # what is loaded is for the other nodes too
                wire.send({"loading": True})

        self._share = new_share(wire, welcome, self._source, tell)
        self._held = welcome
        return self._share

    def _answer(
        self, wire: FrameSocket, where: str, welcome: Welcome, share: Share, near: socket.socket | None
    ) -> None:
        """Until the connection has ended. `near`: to the node's socket, if it was reached. Raises PeerLost."""
        told = partial(self._told, where)
        lender = Lender(welcome, share, {(layer, slot): expert for layer, slot, expert in welcome.duty.experts})
        outpost: Outpost | NearOutpost
        if near is None:
            outpost, way = settle(wire, welcome, self._ways, told=told, give=lender.give)
        else:
            wire.send({"ready": True, "near": True})
            with near:
                given = take(near, 2), told, lender.give
                outpost, way = NearOutpost(wire, welcome.plan.layout, *given), "through shared memory"
        log.info("rank %d of the experts of the node at %s, %s", self._rank, where, way)
        told([])
        try:
            with outpost:
                work = Work(outpost.desk, self._rank, {self._rank: share})
                while outpost.ended is None:
                    if (message := outpost.next_message(LOOK_S)) is not None:
                        self._do(where, work, message, outpost.queue)
                        outpost.answered(message)
                log.warning("the connection to the node at %s has ended: %s", where, outpost.ended)
        finally:
            self._turns.forget(where)
            with self._changed:
                self._nodes.lost(where)
                self._changed.notify_all()

    def _do(self, where: str, work: Work, message: Message, queue: Callable[[bool], None]) -> None:
        """Raises PeerLost for a message that is none: other nodes must not suffer from it."""
        if message.head[0] != COMPUTE:
            raise PeerLost("it would move experts that other nodes use")
        with self._turns.turn(where, 1 + max(0, message.head[3]), queue):
            try:
                work.do(message.head)
            except (ValueError, IndexError, RuntimeError) as error:
                raise PeerLost(f"its message cannot be computed: {error}") from error


def _same(held: Welcome, asked: Welcome) -> bool:
    """Whether the share is what both nodes ask for."""
    return (held.fingerprint, held.plan.of_share, held.placement) == (
        asked.fingerprint,
        asked.plan.of_share,
        asked.placement,
    )


def _boot() -> str:
    try:
        return boot_id()
    except OSError:
        return ""
