"""The destination of a move: reserves blocks for a request that runs elsewhere, and goes on with it after the commit.

A reservation takes nothing from requests of this node and never waits. It ends when the source or the acceptor ends it
or is lost, and after TTL_S without a commit.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable

from engine.core.kv_ready import KvTarget
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.messages import MoveCommit, MoveGrow, MoveIn, unpack_request
from engine.handoff.service import EngineService
from net.bodies import BodyError, typed
from net.channel.channel import Channel, RemoteError

TTL_S = 60.0


class Arriving:
    """Requests that move to this node. `takes()`: whether it takes any now."""

    def __init__(self, channel: Channel, worker: Worker, service: EngineService, takes: Callable[[], bool]) -> None:
        self._node_id = channel.node_id
        self._worker, self._service, self._takes = worker, service, takes
        self._timers: dict[str, asyncio.TimerHandle] = {}
        channel.handle(messages.MOVE_IN, typed(MoveIn, self._on_move_in))
        channel.handle(messages.MOVE_GROW, typed(MoveGrow, self._on_grow))
        channel.handle(messages.MOVE_COMMIT, typed(MoveCommit, self._on_commit))

    async def _on_move_in(self, peer: str, body: MoveIn, data: memoryview) -> KvTarget:
        request = unpack_request(body.request, data, time.monotonic(), key_tokens=self._service.key_tokens)
        self._worker.check(request)
        if not self._takes():
            raise RemoteError(f"{self._node_id} takes no running requests", code="no_room")
        if request.request_id in self._worker.batcher.requests:
            raise RemoteError(f"{self._node_id} still has the request", code="no_room")
        most, limit = request.num_prompt_tokens + request.sampling.max_tokens, self._worker.batcher.max_model_len
        if most > limit:
            raise RemoteError(f"{self._node_id} takes {limit} tokens, the request may have {most}", code="no_room")
        target = self._service.incoming.move_in(request, peer, body.blocks)
        self._service.expect(request.request_id, body.acceptor)
        self._wait_for(request.request_id)
        return target

    async def _on_grow(self, peer: str, body: MoveGrow, data: memoryview) -> KvTarget:
        target = self._service.incoming.grow(body.id, peer, body.blocks)
        self._wait_for(body.id)
        return target

    def _wait_for(self, request_id: str) -> None:
        """For the next message about it, at most TTL_S."""
        self._forget(request_id)
        self._timers[request_id] = asyncio.get_running_loop().call_later(TTL_S, self._expired, request_id)

    async def _on_commit(self, peer: str, body: MoveCommit, data: memoryview) -> None:
        if len(data) % 4:
            raise BodyError(f"{len(data)} bytes are not whole tokens")
        tokens = array("I")
        tokens.frombytes(data)
        self._worker.check()
        self._service.incoming.commit(body.id, peer, tokens.tolist(), body.private)
        self._forget(body.id)

    def _expired(self, request_id: str) -> None:
        self._timers.pop(request_id, None)
        if self._service.incoming.request(request_id) is not None:
            self._service.end(request_id)

    def _forget(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for request_id in list(self._timers):
            self._forget(request_id)
