"""Answers other nodes' messages to an engine node: probe, reserve, prefill, pull, handover, abort, fence, and
borrow (engine/handoff/lending.py). The stages of long prompts are in engine/pipeline/.

This file decides which node moves KV into which blocks, and when those blocks may be reused:

- A decode node holds reserved blocks with transfer references until the prefill node reports that all KV has landed
  (handover), confirms that it will move no more (fence), or is lost (without its connection nothing can land).
  The decode node's own reads into the blocks (pull) end first.
- Every request belongs to its acceptor. When the acceptor is lost, its requests end here or wait for an adopter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cache.block import BlockGeometry
from engine.core.emissions import Emission
from engine.core.kv_ready import KV_REGION, KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer, Mover
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.arenas import Arenas
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
from engine.handoff.own_load import OwnLoad
from engine.handoff.pull import PullOffer
from engine.handoff.push import EncodedPush, Push
from engine.handoff.rail_news import RailNews
from engine.handoff.updates import Failed, HandedOver, Landed, Refused, Report, Update, encode_all
from engine.pipeline.messages import LANDED as STAGE_LANDED
from engine.pipeline.messages import Landed as StageLanded
from engine.pipeline.stages import Stages
from engine.step.request import Request
from net.bodies import encode, typed
from net.channel.channel import Channel, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from net.transfer.engine import TransferEngine

if TYPE_CHECKING:
    from engine.handoff.wire import WireCodec

log = logging.getLogger("mooncake.engine")

MOVE_TIMEOUT_S = 30.0  # per batch
HANDOVER_TIMEOUT_S = 10.0
MAX_FENCED_IDS = 4096


@dataclass(frozen=True, slots=True)
class KvMoves:
    """How KV computed here moves to decode nodes, and the rates of the rails."""

    geometry: BlockGeometry
    rails: RailNews
    how: str = "push"  # --kv-transfer
    overlap: str = "layer"  # --kv-overlap
    arenas: Arenas | None = None  # remembers the decode nodes of prompts
    wire: WireCodec | None = None  # encodes KV for the wire and decodes it; None: KV moves as it is


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
        self._transfer = transfer
        self._worker = worker
        self._moves = moves
        self._max_waiting = max_waiting
        self._own_load = own_load
        self._metrics = metrics
        self._lending = Lending(channel, worker.batcher.pool, KV_REGION, moves.geometry.block_bytes)
        self._acceptors: dict[str, str] = {}  # request id -> node
        self._leaving: dict[str, KvTransfer] = {}  # of ended requests, while bytes are in flight
        self._fenced: OrderedDict[str, None] = OrderedDict()  # ids of requests that may no longer start here
        self._incoming = Incoming(
            channel,
            transfer,
            worker,
            KvForm(moves.geometry.block_bytes, moves.wire),
            max_waiting,
            metrics,
            lambda request_id: request_id in self._fenced,
        )
        self._stages = Stages(channel, worker, metrics, self._stage_computed)
        self._orphans = Orphans(channel, worker.batcher.requests, self._acceptors.__setitem__, self._end)
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome: Callable[[Request], None] | None = None  # requests beyond memory
        channel.handle(messages.PROBE, typed(Probe, self._on_probe))
        channel.handle(messages.RESERVE, typed(Reserve, self._on_reserve))
        channel.handle(messages.PREFILL, typed(Prefill, self._on_prefill))
        channel.handle(messages.HANDOVER, typed(Handover, self._on_handover))
        channel.handle(messages.ABORT, typed(Abort, self._on_abort))
        channel.handle(messages.FENCE, typed(Fence, self._on_fence))
        channel.handle(STAGE_LANDED, typed(StageLanded, self._on_landed))
        channel.on_lost(self.peer_lost)
        channel.on_closed(self.peer_lost)

    # --- questions

    async def _on_probe(self, peer: str, body: Probe, data: memoryview) -> Probed:
        self._worker.check()
        keys = split_keys(data)
        blocks = self._worker.batcher.blocks
        matched = blocks.match_keys(keys) if blocks.prefix_caching else []
        load = await self._own_load.answer(body.horizon_s)
        return Probed(load, self._moves.rails.tell(body.to, keys), len(matched) * self._moves.geometry.block_size)

    # --- decode side

    async def _on_reserve(self, peer: str, body: Reserve, data: memoryview) -> KvTarget:
        request = unpack_request(body.request, data, time.monotonic())
        self._worker.check(request)
        self._incoming.check_room(self._own_load.blocks_in_s)
        self._acceptors[request.request_id] = peer
        return await self._incoming.reserve(request, body.prefill_nodes)

    async def _on_handover(self, peer: str, body: Handover, data: memoryview) -> None:
        if (request := self._incoming.request(body.id)) is not None and not request.num_output_tokens:
            self._own_load.decode(request.service_class)
        await self._incoming.all_landed(body.id)
        self._incoming.arrive(body.id, body.first_token, body.private)

    async def _on_landed(self, peer: str, body: StageLanded, data: memoryview) -> None:
        self._incoming.landed(body.id, peer, body.tokens)

    async def _give_up(self, reservation: Reservation) -> None:
        await self._incoming.give_up(reservation)
        self.blocks_freed()

    # --- prefill side

    async def _on_prefill(self, peer: str, body: Prefill, data: memoryview) -> None:
        part = None if body.stage is None else self._stages.part_of(body.stage)
        request = unpack_request(body.request, data, time.monotonic(), body.target is not None, part)
        self._worker.check(request)
        if request.request_id in self._fenced:
            raise RemoteError("the request was cancelled before it started", code="gone")
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
        if (target := body.target) is not None:
            layers = None if request.part is None else range(request.part.begin, request.part.end)
            ready = KvReady(self._moves.geometry, target, request.num_tokens, self._moves.overlap, layers)
            mover = self.mover(request.request_id, target)
            transfer = KvTransfer(target.node, mover, ready, self._worker.batcher.pool, self._moves.wire)
            if request.part is not None:
                transfer.watch(partial(self._stage_landed, request.request_id, target.node))
        self._acceptors[request.request_id] = peer
        self._worker.add(request, transfer)
        if body.stage is not None:
            self._stages.add(request, body.stage)

    def take_beyond(self, welcome: Callable[[Request], None]) -> None:
        """This node takes requests whose KV exceeds its arena: `welcome` hears of each before it is queued."""
        self._welcome = welcome

    def _stage_landed(self, request_id: str, decode: str, tokens: int) -> None:
        self._channel.post(decode, STAGE_LANDED, encode(StageLanded(request_id, tokens)))

    def _stage_computed(self, request: Request, error: str | None) -> None:
        """This node has computed its layers of the whole prompt; the last stage hands over. `error`: the next stage
        will not compute its own."""
        self._stages.end(request.request_id)
        acceptor = self._acceptors.pop(request.request_id, None)
        transfer = self._worker.take_transfer(request.request_id)
        if transfer is None:
            return
        if acceptor is None or error is not None:
            self._stop_soon(request.request_id, transfer)
            if acceptor is not None and error is not None:
                self._tell(acceptor, request, Failed(error, self._report(request)))
            return
        self._leaving[request.request_id] = transfer
        self._spawn(self._deliver(request, transfer, acceptor))

    async def _deliver(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """Wait until all KV of a stage has landed. Its last news to the decode node leaves with the last piece."""
        begin = time.monotonic()
        try:
            await self._moved(request, transfer, begin)
            self._tell(acceptor, request, Landed(self._report(request)))
        except Exception as error:
            await transfer.stop()
            self._tell(acceptor, request, _why_not(error, self._report(request)))
            self._metrics.count("mooncake:transfer_failures", transport=transfer.report.transport or "none")
            log.info("KV of %s for %s did not arrive: %s", request.request_id, transfer.node, error)
        finally:
            self._leaving.pop(request.request_id, None)
            self.blocks_freed()

    def mover(self, request_id: str, target: KvTarget) -> Mover:
        """Moves KV of this node's arena into the blocks of `target`."""
        wire = self._moves.wire
        region = KV_REGION if wire is None else wire.region.name
        if self._moves.how == "pull":
            return PullOffer(self._channel, region, request_id, target, MOVE_TIMEOUT_S)
        push = Push(self._transfer, region, target, MOVE_TIMEOUT_S)
        return push if wire is None else EncodedPush(push, self._channel, request_id, target, MOVE_TIMEOUT_S)

    async def _hand_over(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """After the last layer: wait until all KV has landed, then tell the decode node to continue."""
        begin = time.monotonic()
        try:
            await self._moved(request, transfer, begin)
            # Sent before the call: the decode node may finish a short answer before it replies here.
            self._tell(acceptor, request, Landed(self._report(request)))
            handover = Handover(request.request_id, request.token_ids[-1], request.private)
            patience_s = HANDOVER_TIMEOUT_S if request.part is None else MOVE_TIMEOUT_S  # for the other stages' KV
            await self._channel.call(transfer.node, messages.HANDOVER, encode(handover), timeout_s=patience_s)
        except Exception as error:
            await transfer.stop()
            self._tell(acceptor, request, _why_not(error, self._report(request)))
            self._metrics.count("mooncake:transfer_failures", transport=transfer.report.transport or "none")
            log.info("handover of %s to %s failed: %s", request.request_id, transfer.node, error)
        else:
            self._remember(request, transfer.node)
            # Only then may the acceptor stop watching this node.
            self._tell(acceptor, request, HandedOver())
        finally:
            self._leaving.pop(request.request_id, None)

    async def _moved(self, request: Request, transfer: KvTransfer, begin: float) -> None:
        """Wait until all KV has landed, and note it. `begin`: when the last of it was computed, monotonic seconds."""
        report = await transfer.finish()
        if self._moves.how == "push":  # the decode node counts a pull
            self._metrics.count_transfer("write", report.transport, report.nbytes, report.seconds)
        now = time.monotonic()
        detail = {
            "how": self._moves.how,
            "overlap": self._moves.overlap,
            "bytes": report.nbytes,
            "batches": report.batches,
            "transport": report.transport,
            "seconds": report.seconds,
            "exposed_seconds": now - begin,  # from the end of the prefill until all KV had landed
            "intervals": report.intervals.before(now),
        }
        if (wire := self._moves.wire) is not None:
            detail |= {"wire_dtype": wire.dtype, "saved_bytes": report.saved}
            self._metrics.count("mooncake:wire_saved_bytes", report.saved)
        request.journal.note(now, "kv_moved", detail)

    def _remember(self, request: Request, node: str) -> None:
        """Remember the decode node: the next turn of a chat needs the KV that `node` computes now."""
        size, arenas = self._moves.geometry.block_size, self._moves.arenas
        full = (request.num_tokens - 1) // size
        if arenas is not None and full:
            arenas.handed_over(request.block_keys(size)[full - 1], node)

    async def _on_fence(self, peer: str, body: Fence, data: memoryview) -> None:
        await self._cancel(body.id)

    async def _cancel(self, request_id: str) -> None:
        """Once this returns, this node neither computes nor moves any part of the request."""
        self._fenced[request_id] = None
        self._stages.end(request_id)
        while len(self._fenced) > MAX_FENCED_IDS:
            self._fenced.popitem(last=False)
        self._worker.abort(request_id)
        if (transfer := self._worker.take_transfer(request_id)) is not None:
            await self._stop_transfer(request_id, transfer)
        elif (transfer := self._leaving.get(request_id)) is not None:
            await transfer.stop()

    def _stop_soon(self, request_id: str, transfer: KvTransfer) -> None:
        self._leaving[request_id] = transfer  # at once: a fence that comes before the task runs must wait for it
        self._spawn(self._stop_transfer(request_id, transfer))

    async def _stop_transfer(self, request_id: str, transfer: KvTransfer) -> None:
        """Stop the transfer of a request that ended without a handover."""
        self._leaving[request_id] = transfer
        try:
            await transfer.stop()
        finally:
            self._leaving.pop(request_id, None)

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
    def incoming(self) -> Incoming:
        return self._incoming

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
        await self._stages.close()
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
                    self._stop_soon(request.request_id, transfer)
                continue
            if request.prompt_logprobs and emission.token_id is not None and request.num_output_tokens == 1:
                scores, scored = pack_prompt_logprobs(request)
                self._channel.post(acceptor, messages.PROMPT_LOGPROBS, encode(scores), scored)
            update = update_of(emission, self._node_id, time.monotonic())
            updates[acceptor].append((request.request_id, update))
            if reason == "handover" and transfer is not None:
                self._leaving[request.request_id] = transfer
                self._spawn(self._hand_over(request, transfer, acceptor))
            elif transfer is not None:
                self._stop_soon(request.request_id, transfer)
            if emission.ends:
                self._stages.end(request.request_id)
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
        task = spawn(coroutine, "ending or handing over a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def owed(self) -> int:
        """Number of requests that an acceptor waits for, without those whose acceptor was lost."""
        return sum(acceptor != NOBODY for acceptor in self._acceptors.values()) + len(self._leaving)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here, without those of the worker's running transfers."""
        yield from self._incoming.held_blocks()
        yield from self._lending.held_blocks()
        for transfer in self._leaving.values():
            yield from transfer.held_blocks()

    def held(self) -> dict[str, int]:
        """Counts of resources held for requests; all zero on an idle node."""
        return {
            "requests": len(self._worker.batcher.requests),
            "incoming": len(self._incoming),
            "stages": len(self._stages),
            "leaving": len(self._leaving),
            "lent": len(self._lending),
            "acceptors": len(self._acceptors),
        }


def _why_not(error: Exception, report: Report) -> Failed | Refused:
    """The update for the acceptor after a failed handover."""
    match error:
        case RemoteError(code="refused", facts={"retry_after_s": float() | int() as retry_after_s}):
            return Refused(error.reason, retry_after_s, error.facts, report)
    return Failed(str(error), report)
