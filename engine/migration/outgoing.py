"""The source of a move: carries out the effects of engine/migration/move.py.

KV is copied like that of a prompt: by push or pull, encoded with --wire-dtype, by the same transports. Each copy holds
its blocks here until it has landed, so a request that ends meanwhile does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cache.block import BlockGeometry
from engine.core.kv_ready import KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.items import report_of
from engine.handoff.messages import Abort, Fence, MoveCommit, MoveGrow, MoveIn, Moving, pack_request
from engine.handoff.outgoing import KvMoves
from engine.handoff.service import EngineService
from engine.handoff.updates import Failed, Moved, Stayed
from engine.migration.move import (
    Broken,
    Commit,
    Committed,
    Copied,
    Copy,
    Drop,
    Effect,
    Event,
    Fail,
    Free,
    Gone,
    Move,
    Phase,
    Reserve,
    Reserved,
    Resume,
    Stop,
    Stopped,
    Tell,
    Told,
    Unanswered,
)
from engine.step.request import Request, RequestState
from net.bodies import answered, encode, typed
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics

log = logging.getLogger("mooncake.migration")

ANSWER_S = 5.0
"""For each answer of the destination and the acceptor."""


@dataclass(eq=False, slots=True)
class Leaving:
    """A request on its way out."""

    request: Request
    acceptor: str
    to: str
    why: str
    core: Move
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    target: KvTarget | None = None
    transfer: KvTransfer | None = None
    nbytes: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Outgoing:
    """Moves of requests that run on this node."""

    def __init__(
        self,
        channel: Channel,
        worker: Worker,
        service: EngineService,
        moves: KvMoves,
        metrics: Metrics,
    ) -> None:
        self._channel, self._worker, self._service, self._metrics = channel, worker, service, metrics
        self._geometry: BlockGeometry = moves.geometry
        self._wire, self._pushes = moves.wire, moves.how == "push"
        self._leaving: dict[str, Leaving] = {}
        channel.handle(messages.MOVE_FENCE, typed(Fence, self._on_fence))
        channel.on_lost(self._lost)
        channel.on_closed(self._lost)

    def __len__(self) -> int:
        return len(self._leaving)

    def ids(self) -> set[str]:
        return set(self._leaving)

    def nodes(self) -> set[str]:
        """The destinations of the moves in progress."""
        return {one.to for one in self._leaving.values()}

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""
        for one in self._leaving.values():
            if one.transfer is not None:
                yield from one.transfer.held_blocks()

    async def move(self, request: Request, to: str, why: str) -> bool:
        """Move a request that decodes here to the decode node `to`. `why`: drain, balance or pressure, for metrics and
        the timeline. Returns whether it goes on there; if not, it goes on here, or its acceptor places it again."""
        request_id = request.request_id
        acceptor = self._service.acceptor_of(request_id)
        if acceptor is None or request_id in self._leaving:
            return False
        one = self._leaving[request_id] = Leaving(request, acceptor, to, why, Move(self._geometry.block_size))
        try:
            self._do(one, one.core.begin(request.num_computed))
            while one.core.phase is not Phase.OVER:
                event = await one.events.get()
                if one.core.phase is not Phase.COMMITTING and (gone := self._gone(one)) is not None:
                    event = gone
                self._do(one, one.core.handle(time.monotonic(), event))
        finally:
            for task in one.tasks:
                task.cancel()
            await asyncio.gather(*one.tasks, return_exceptions=True)
            await self._stop(one)
            del self._leaving[request_id]
        return request.finish_reason == "moved"

    def _gone(self, one: Leaving) -> Gone | None:
        request = one.request
        if request.finished:
            return Gone(f"the request has ended: {request.finish_reason}")
        if request.state is not RequestState.MOVING and request.num_uncomputed != 1:
            return Gone("the request has lost its blocks")
        return None

    # --- effects

    def _do(self, one: Leaving, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reserve(blocks):
                    self._later(one, self._reserve(one, blocks))
                case Copy(first, tokens):
                    self._later(one, self._copy(one, first, tokens))
                case Stop():
                    self._later(one, self._lift(one))
                case Tell():
                    self._later(one, self._tell(one))
                case Commit():
                    self._later(one, self._commit(one))
                case Free(pause_s):
                    self._free(one, pause_s)
                case Resume(told):
                    self._resume(one, told)
                case Drop(reason):
                    self._drop(one, reason)
                case Fail(reason):
                    self._fail(one, reason)

    def _later(self, one: Leaving, work: Coroutine[Any, Any, Event]) -> None:
        async def put() -> None:
            try:
                one.events.put_nowait(await work)
            except Exception as error:
                one.events.put_nowait(Broken(f"{type(error).__name__}: {error}"))
                raise

        one.tasks.add(task := spawn(put(), "moving a request"))
        task.add_done_callback(one.tasks.discard)

    async def _reserve(self, one: Leaving, blocks: int) -> Event:
        request = one.request
        try:
            if one.target is None:
                wire, data = pack_request(request, time.monotonic() - request.arrival)
                body = encode(MoveIn(wire, one.acceptor, blocks))
                reply, _ = await self._channel.call(one.to, messages.MOVE_IN, body, data, ANSWER_S)
            else:
                body = encode(MoveGrow(request.request_id, blocks))
                reply, _ = await self._channel.call(one.to, messages.MOVE_GROW, body, (), ANSWER_S)
            one.target = answered(KvTarget, reply)
        except (RemoteError, ConnectionError, TimeoutError) as error:
            return Broken(f"{one.to} reserves no blocks: {error}")
        return Reserved(len(one.target.block_ids), request.num_computed)

    async def _copy(self, one: Leaving, first: int, tokens: int) -> Event:
        request, target, geometry = one.request, one.target, self._geometry
        assert target is not None
        if (gone := self._gone(one)) is not None:
            return gone
        first = max(first, target.first_missing)
        if first * geometry.block_size < tokens:
            ready = KvReady(geometry, replace(target, first_missing=first), tokens, "chunk")
            mover = self._service.outgoing.mover(request.request_id, target)
            one.transfer = KvTransfer(one.to, mover, ready, self._worker.batcher.pool, self._wire)
            one.transfer.layer_done(request.block_ids, geometry.num_layers - 1, first * geometry.block_size, tokens)
            try:
                report = await one.transfer.finish()
            except Exception as error:  # whatever the mover raises
                return Broken(f"the copy to {one.to} failed: {error}")
            one.nbytes += report.nbytes
            if self._pushes:  # the destination counts a pull
                self._metrics.count_transfer("write", report.transport, report.nbytes, report.seconds)
        return Copied(request.num_computed)

    async def _lift(self, one: Leaving) -> Event:
        if await self._worker.lift(one.request):
            return Stopped(one.request.num_computed)
        return self._gone(one) or Broken("the request does not decode now")

    async def _tell(self, one: Leaving) -> Event:
        body = encode(Moving(one.request.request_id, one.to))
        try:
            await self._channel.call(one.acceptor, messages.MOVING, body, (), ANSWER_S)
        except (RemoteError, ConnectionError, TimeoutError) as error:
            return Broken(f"the acceptor {one.acceptor} was not told: {error}")
        return Told()

    async def _commit(self, one: Leaving) -> Event:
        data = [array("I", one.request.token_ids).tobytes()]
        body = encode(MoveCommit(one.request.request_id, one.request.private))
        try:
            await self._channel.call(one.to, messages.MOVE_COMMIT, body, data, ANSWER_S)
        except (RemoteError, PeerRefused) as error:
            return Broken(f"{one.to} does not take the request: {error}")
        except (PeerLost, ConnectionError, TimeoutError) as error:
            return Unanswered(f"{one.to} did not say whether it took the request: {error}")
        return Committed()

    def _free(self, one: Leaving, pause_s: float) -> None:
        request, now = one.request, time.monotonic()
        self._metrics.count("mooncake:migrations", reason=one.why, result="moved")
        self._metrics.observe("mooncake:migration_pause_seconds", pause_s)
        self._metrics.count("mooncake:migrated_bytes", one.nbytes)
        if request.finished:  # its acceptor ended it while the answer was on its way
            return
        detail = {
            "to": one.to,
            "reason": one.why,
            "pause_s": pause_s,
            "stages": one.core.stages,
            "bytes": one.nbytes,
        }
        request.journal.note(now, "moved", detail)
        report = report_of(request, self._channel.node_id, now)
        self._service.tell(one.acceptor, request.request_id, Moved(one.to, report))
        self._worker.batcher.moved(now, request)
        self._service.forget(request.request_id)

    def _resume(self, one: Leaving, told: bool) -> None:
        request = one.request
        if request.state is RequestState.MOVING:
            self._worker.batcher.put_back(time.monotonic(), request)
            self._worker.wake()
        if told and (acceptor := self._service.acceptor_of(request.request_id)) is not None:
            self._service.tell(acceptor, request.request_id, Stayed())

    def _drop(self, one: Leaving, reason: str) -> None:
        log.info("%s stays here: %s", one.request.request_id, reason)
        self._metrics.count("mooncake:migrations", reason=one.why, result="stayed")
        self._channel.post(one.to, messages.ABORT, encode(Abort([one.request.request_id])))

    def _fail(self, one: Leaving, reason: str) -> None:
        request = one.request
        self._metrics.count("mooncake:migrations", reason=one.why, result="failed")
        acceptor = self._service.acceptor_of(request.request_id)
        if acceptor is not None and not request.finished:
            report = report_of(request, self._channel.node_id, time.monotonic())
            self._service.tell(acceptor, request.request_id, Failed(reason, report))
        self._service.end(request.request_id)

    # --- from outside

    async def _on_fence(self, peer: str, body: Fence, data: memoryview) -> None:
        """The destination has given the request up: once this returns, nothing more is copied."""
        one = self._leaving.get(body.id)
        if one is not None and one.to == peer and one.core.phase is not Phase.COMMITTING:
            one.events.put_nowait(Broken(f"{peer} gave the request up"))
            await self._stop(one)

    async def _stop(self, one: Leaving) -> None:
        if one.transfer is not None:
            await one.transfer.stop()

    def _lost(self, node: str) -> None:
        for one in self._leaving.values():
            if node == one.to and one.core.phase is not Phase.COMMITTING:
                one.events.put_nowait(Broken(f"{node} was lost"))

    async def close(self) -> None:
        """Stop all copies: this node ends."""
        for one in list(self._leaving.values()):
            await self._stop(one)
