"""Answers other nodes' messages to an engine node: probe, reserve, prefill, pull, handover, abort, fence, and
borrow (engine/handoff/lending.py). Groups that compute long prompts are in engine/prefill_group/, KV that leaves in
outgoing.py.

This file decides which node moves KV into which blocks, and when those blocks may be reused:

- A decode node holds reserved blocks with transfer references until the prefill node reports that all KV has landed
  (handover), confirms that it will move no more (fence), or is lost (without its connection nothing can land).
  The decode node's own reads into the blocks (pull) end first.
- Every request belongs to its acceptor. When the acceptor is lost, its requests end here or wait for an adopter.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from engine.core.emissions import Emission
from engine.core.kv_ready import KV_REGION, KvTarget
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.incoming import Incoming, KvForm, Reservation
from engine.handoff.items import report_of, update_of
from engine.handoff.lending import Lending
from engine.handoff.messages import (
    Abort,
    Fence,
    Handover,
    Prefill,
    Probe,
    Probed,
    Reserve,
    pack_prompt_logprobs,
    split_keys,
    unpack_request,
)
from engine.handoff.orphans import NOBODY, Orphans
from engine.handoff.outgoing import KvMoves, Outgoing
from engine.handoff.own_load import OwnLoad
from engine.handoff.updates import Failed, Report, Update, encode_all
from engine.prefill_group.members import Members
from engine.prefill_group.messages import LANDED as PART_LANDED
from engine.prefill_group.messages import Landed as PartLanded
from engine.step.request import Request
from net.bodies import encode, typed
from net.channel.channel import Channel, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from net.transfer.engine import TransferEngine

MAX_FENCED_IDS = 4096


class EngineService:
    """Answers the engine messages of `channel` with `worker`."""

    def __init__(
        self,
        channel: Channel,
        transfer: TransferEngine,
        worker: Worker,
        moves: KvMoves,
        max_waiting: int,
        own_load: OwnLoad,
        metrics: Metrics,
    ) -> None:
        self._node_id = channel.node_id
        self._channel = channel
        self._worker = worker
        self._moves = moves
        self._max_waiting = max_waiting
        self._own_load = own_load
        self._lending = Lending(channel, worker.batcher.pool, KV_REGION, moves.geometry)
        self._acceptors: dict[str, str] = {}  # request id -> node
        self._fenced: OrderedDict[str, None] = OrderedDict()  # ids of requests that may no longer start here
        self._incoming = Incoming(
            channel,
            transfer,
            worker,
            KvForm(
                moves.geometry.block_bytes,
                moves.wire,
                moves.geometry.dtype,
                moves.geometry.block_size,
                moves.prefills,
            ),
            max_waiting,
            metrics,
            lambda request_id: request_id in self._fenced,
        )
        self._outgoing = Outgoing(channel, transfer, moves, metrics, self._tell, self.blocks_freed)
        self._members = Members(channel, worker, metrics, self._part_computed)
        self._orphans = Orphans(channel, worker.batcher.requests, self._acceptors.__setitem__, self._end)
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome: Callable[[Request], None] | None = None  # requests beyond memory
        channel.handle(messages.PROBE, typed(Probe, self._on_probe))
        channel.handle(messages.RESERVE, typed(Reserve, self._on_reserve))
        channel.handle(messages.PREFILL, typed(Prefill, self._on_prefill))
        channel.handle(messages.HANDOVER, typed(Handover, self._on_handover))
        channel.handle(messages.ABORT, typed(Abort, self._on_abort))
        channel.handle(messages.FENCE, typed(Fence, self._on_fence))
        channel.handle(PART_LANDED, typed(PartLanded, self._on_landed))
        channel.on_lost(self.peer_lost)
        channel.on_closed(self.peer_lost)

    # --- questions

    async def _on_probe(self, peer: str, body: Probe, data: memoryview) -> Probed:
        self._worker.check()
        keys, each = split_keys(data), self._moves.pooled_per_block
        blocks = self._worker.batcher.blocks
        matched = blocks.match_keys(keys[each - 1 :: each]) if blocks.prefix_caching else []
        load = await self._own_load.answer(body.horizon_s)
        return Probed(load, self._moves.rails.tell(body.to, keys), len(matched) * self._moves.geometry.block_size)

    # --- decode side

    async def _on_reserve(self, peer: str, body: Reserve, data: memoryview) -> KvTarget:
        request = unpack_request(body.request, data, time.monotonic(), key_tokens=self._moves.key_tokens)
        self._worker.check(request)
        if not self._worker.batcher.decodes_on(request):
            raise self._too_long(request)
        self._incoming.check_room(self._own_load.blocks_in_s)
        self._acceptors[request.request_id] = peer
        return await self._incoming.reserve(request, body.prefill_nodes)

    async def _on_handover(self, peer: str, body: Handover, data: memoryview) -> None:
        if (request := self._incoming.request(body.id)) is not None and not request.num_output_tokens:
            self._own_load.decode(request.service_class)
        await self._incoming.all_landed(body.id)
        self._incoming.arrive(body.id, body.first_token, body.private)

    async def _on_landed(self, peer: str, body: PartLanded, data: memoryview) -> None:
        self._incoming.landed(body.id, peer, body.tokens)

    async def _give_up(self, reservation: Reservation) -> None:
        await self._incoming.give_up(reservation)
        self.blocks_freed()

    # --- prefill side

    async def _on_prefill(self, peer: str, body: Prefill, data: memoryview) -> None:
        part = None if body.place is None else self._members.part_of(body.place)
        tokens = self._moves.key_tokens
        request = unpack_request(body.request, data, time.monotonic(), body.target, part, tokens)
        self._worker.check(request)
        if request.request_id in self._fenced:
            raise RemoteError("the request was cancelled before it started", code="gone")
        if not (body.beyond or self._worker.batcher.fits(request)):
            raise self._too_long(request)
        self._own_load.keep(body.promise, request)
        if len(self._worker.batcher.waiting) >= self._max_waiting:
            raise RemoteError(
                f"{self._max_waiting} requests already wait on {self._node_id}",
                "overloaded",
                {"retry_after_s": self._own_load.room_in_s()},
            )
        if body.beyond:
            if self._welcome is None:
                raise RemoteError(f"{self._node_id} takes no request whose KV exceeds its arena: --beyond-memory off")
            self._welcome(request)
        transfer = None
        if body.target is not None:
            transfer = self._outgoing.transfer(request, body.target, self._worker.batcher.pool)
        self._acceptors[request.request_id] = peer
        self._worker.add(request, transfer)
        if body.place is not None:
            self._members.add(request, body.place, transfer)

    def _too_long(self, request: Request) -> RemoteError:
        """Placement knows the limit (engine/front/known.py), but not on acceptors of an older version."""
        limit = self._worker.batcher.max_model_len
        return RemoteError(f"{self._node_id} takes {limit} tokens, the request has {request.num_tokens}", "too_long")

    def take_beyond(self, welcome: Callable[[Request], None]) -> None:
        """This node takes requests whose KV exceeds its arena: `welcome` hears of each before it is queued."""
        self._welcome = welcome

    def _part_computed(self, request: Request, error: str | None) -> None:
        """This node has computed its part of the prompt; the last node of the group hands over. `error`: another node
        will not compute its own."""
        self._members.end(request.request_id)
        acceptor = self._acceptors.pop(request.request_id, None)
        transfer = self._worker.take_transfer(request.request_id)
        if transfer is None:
            return
        if acceptor is None or error is not None:
            self._outgoing.stop_soon(request.request_id, transfer)
            if acceptor is not None and error is not None:
                self._tell(acceptor, request, Failed(error, self._report(request)))
            return
        self._outgoing.deliver(request, transfer, acceptor)

    async def _on_fence(self, peer: str, body: Fence, data: memoryview) -> None:
        await self._cancel(body.id)

    async def _cancel(self, request_id: str) -> None:
        """Once this returns, this node neither computes nor moves any part of the request."""
        self._forbid(request_id)
        self._members.end(request_id)
        self._worker.abort(request_id)
        await self._outgoing.stop(request_id, self._worker.take_transfer(request_id))

    def _forbid(self, request_id: str) -> None:
        """The request may no longer start here."""
        self._fenced[request_id] = None
        while len(self._fenced) > MAX_FENCED_IDS:
            self._fenced.popitem(last=False)

    # --- ends

    async def _on_abort(self, peer: str, body: Abort, data: memoryview) -> None:
        for request_id in body.ids:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._acceptors.pop(request_id, None)
        reservation = self._incoming.take(request_id)
        if reservation is not None:
            self._worker.abort(request_id)
            self._spawn(self._give_up(reservation))
        else:
            self._forbid(request_id)  # at once: it may wait for blocks, and get them before the task runs
            self._spawn(self._cancel(request_id))
        self.blocks_freed()

    def peer_lost(self, node: str) -> None:
        """`node` is gone: requests that it accepted end here or wait for an adopter; KV from it will not arrive."""
        for request_id in [r for r, acceptor in self._acceptors.items() if acceptor == node]:
            if self._orphans.keep(request_id):
                self._acceptors[request_id] = NOBODY
            else:
                self._end(request_id)
        for reservation in self._incoming.of_node(node):
            request = reservation.request
            acceptor = self._acceptors.get(request.request_id)
            self._end(request.request_id)
            if acceptor is not None and not reservation.moves:  # else the acceptor watches `node` itself
                self._tell(acceptor, request, Failed(f"prefill node {node} was lost", self._report(request)))

    # --- running requests that move between decode nodes (engine/migration/)

    @property
    def key_tokens(self) -> int:
        """As in Request."""
        return self._moves.key_tokens

    @property
    def incoming(self) -> Incoming:
        return self._incoming

    @property
    def outgoing(self) -> Outgoing:
        return self._outgoing

    def acceptor_of(self, request_id: str) -> str | None:
        """None if the request is unknown here or its acceptor was lost."""
        return self._acceptors.get(request_id) or None

    def expect(self, request_id: str, acceptor: str) -> None:
        """A request of `acceptor` moves here."""
        self._acceptors[request_id] = acceptor

    def forget(self, request_id: str) -> None:
        """The request goes on elsewhere, or it never came."""
        self._acceptors.pop(request_id, None)
        self.blocks_freed()

    def end(self, request_id: str) -> None:
        """End a request here; what moves its KV stops first."""
        self._end(request_id)

    def tell(self, acceptor: str, request_id: str, update: Update) -> None:
        """Behind all earlier tokens of this node."""
        self._send(acceptor, [(request_id, update)])

    # --- ends of both

    def blocks_freed(self) -> None:
        """Let a waiting reservation or request try again."""
        self._incoming.blocks_freed()
        self._worker.wake()

    async def close(self) -> None:
        self._orphans.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outgoing.close()
        await self._members.close()
        await self._incoming.close()
        self._lending.close()

    # --- tokens to their acceptors

    def on_emissions(self, emissions: Sequence[Emission]) -> None:
        """Called by the worker once per step; sends one message per acceptor."""
        updates: defaultdict[str, list[tuple[str, Update]]] = defaultdict(list)
        for emission in emissions:
            request = emission.request
            acceptor = self._acceptors.get(request.request_id)
            reason = request.finish_reason
            transfer = self._worker.take_transfer(request.request_id) if emission.ends else None
            if acceptor is None:
                if transfer is not None:
                    self._outgoing.stop_soon(request.request_id, transfer)
                continue
            if request.prompt_logprobs and emission.token_id is not None and request.num_output_tokens == 1:
                scores, scored = pack_prompt_logprobs(request)
                self._channel.post(acceptor, messages.PROMPT_LOGPROBS, encode(scores), scored)
            update = update_of(emission, self._node_id, time.monotonic())
            updates[acceptor].append((request.request_id, update))
            if reason == "handover" and transfer is not None:
                self._outgoing.hand_over(request, transfer, acceptor)
            elif transfer is not None:
                self._outgoing.stop_soon(request.request_id, transfer)
            if emission.ends:
                self._members.end(request.request_id)
                if reason in ("stop", "length"):
                    self._own_load.load.lengths.ended(request.num_output_tokens)
                    self._orphans.ended(request)
                del self._acceptors[request.request_id]
        updates.pop(NOBODY, None)
        for acceptor, batch in updates.items():
            self._send(acceptor, batch)
        self.blocks_freed()

    def _report(self, request: Request) -> Report:
        return report_of(request, self._node_id, time.monotonic())

    def _tell(self, acceptor: str, request: Request, update: Update) -> None:
        self._send(acceptor, [(request.request_id, update)])

    def _send(self, acceptor: str, updates: Sequence[tuple[str, Update]]) -> None:
        self._channel.post(acceptor, messages.TOKENS, encode_all(updates))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = spawn(coroutine, "ending a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def owed(self) -> int:
        """Number of requests that an acceptor waits for, without those whose acceptor was lost."""
        return sum(acceptor != NOBODY for acceptor in self._acceptors.values()) + len(self._outgoing)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here, without those of the worker's running transfers."""
        yield from self._incoming.held_blocks()
        yield from self._lending.held_blocks()
        yield from self._outgoing.held_blocks()

    def held(self) -> dict[str, int]:
        """Counts of resources held for requests; all zero on an idle node."""
        return {
            "requests": len(self._worker.batcher.requests),
            "incoming": len(self._incoming),
            "stages": len(self._members),
            "leaving": len(self._outgoing),
            "lent": len(self._lending),
            "acceptors": len(self._acceptors),
        }
