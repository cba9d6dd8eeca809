"""What other nodes may ask of an engine node: probe, reserve, prefill, pull, handover, abort, fence, and
borrow blocks (engine/kv/lending.py).

Who moves KV into whose blocks, and when those blocks may be used again, is decided here:

- a decode node holds reserved blocks with transfer references until the prefill node says that all KV has landed
  (handover), answers that it will move no more (fence), or is lost (its connection is gone, so nothing can land);
  its own reads into them (pull) end before;
- every request belongs to its acceptor: when that is lost, its requests end here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cache.block import KEY_BYTES, BlockGeometry
from engine.kv.arenas import Arenas
from engine.kv.incoming import Incoming, Reservation
from engine.kv.kv_ready import KV_REGION, KvReady, KvTarget
from engine.kv.kv_transfer import KvTransfer, Mover
from engine.kv.lending import Lending
from engine.kv.pull import PullOffer
from engine.kv.push import EncodedPush, Push
from engine.request import Request
from engine.serving import messages
from engine.serving.items import extra, item
from engine.serving.messages import pack_prompt_logprobs, unpack_request
from engine.serving.orphans import NOBODY, Orphans
from engine.serving.own_load import OwnLoad
from engine.serving.rail_news import RailNews
from engine.worker import Emission, Worker
from net.channel import Channel, RemoteError
from net.metrics import Metrics
from net.tasks import spawn
from net.transfer import TransferEngine

if TYPE_CHECKING:
    from engine.kv.wire import WireCodec

log = logging.getLogger("mooncake.engine")

MOVE_TIMEOUT_S = 30.0  # of one batch
MAX_FENCED_IDS = 4096


class EngineService:
    """Answers the engine messages of `channel` with `worker`."""

    def __init__(
        self,
        node_id: str,
        channel: Channel,
        transfer: TransferEngine,
        worker: Worker,
        geometry: BlockGeometry,
        max_waiting: int,
        own_load: OwnLoad,
        metrics: Metrics,
        kv_transfer: str = "push",
        kv_overlap: str = "layer",
        rails: RailNews | None = None,
        arenas: Arenas | None = None,
        wire: WireCodec | None = None,
    ) -> None:
        """kv_transfer, kv_overlap: how the KV of prompts computed here gets to their decode nodes; arenas: told of
        those nodes; wire: what encodes and decodes it on its way, None = nothing does."""
        self._node_id = node_id
        self._channel = channel
        self._transfer = transfer
        self._worker = worker
        self._geometry = geometry
        self._max_waiting = max_waiting
        self._own_load = own_load
        self._rails = rails or RailNews(transfer)
        self._metrics = metrics
        self._kv_transfer = kv_transfer
        self._kv_overlap = kv_overlap
        self._arenas = arenas
        self._wire = wire
        self._lending = Lending(channel, worker.batcher.pool, KV_REGION, geometry.block_bytes)
        self._acceptors: dict[str, str] = {}  # request id -> node
        self._leaving: dict[str, KvTransfer] = {}  # of requests that have ended here, until nothing is in flight
        self._fenced: OrderedDict[str, None] = OrderedDict()  # ids that may not start here any more
        self._incoming = Incoming(
            channel,
            transfer,
            worker,
            geometry,
            max_waiting,
            metrics,
            lambda request_id: request_id in self._fenced,
            wire,
        )
        self._orphans = Orphans(channel, worker.batcher.requests, self._acceptors.__setitem__, self._end)
        self._tasks: set[asyncio.Task[None]] = set()
        channel.handle(messages.PROBE, self._on_probe)
        channel.handle(messages.RESERVE, self._on_reserve)
        channel.handle(messages.PREFILL, self._on_prefill)
        channel.handle(messages.HANDOVER, self._on_handover)
        channel.handle(messages.ABORT, self._on_abort)
        channel.handle(messages.FENCE, self._on_fence)
        channel.on_lost(self.peer_lost)
        channel.on_closed(self.peer_lost)

    # --- questions

    async def _on_probe(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        self._worker.check()
        keys = [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
        matched = self._worker.batcher.pool.match(keys) if self._worker.batcher.blocks.prefix_caching else []
        local = {"local_tokens": len(matched) * self._geometry.block_size}
        return await self._own_load.answer(body["horizon_s"]) | self._rails.tell(body["to"], keys) | local

    # --- decode side

    async def _on_reserve(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        self._worker.check()
        request = unpack_request(body, data, time.monotonic())
        self._incoming.check_room(self._own_load.blocks_in_s)
        self._acceptors[request.request_id] = peer
        return await self._incoming.reserve(request, body["prefill_node"])

    async def _on_handover(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        if (request := self._incoming.request(body["id"])) is not None and not request.num_output_tokens:
            self._own_load.decode(request.service_class)
        self._incoming.arrive(body["id"], body["first_token"])

    async def _give_up(self, reservation: Reservation) -> None:
        await self._incoming.give_up(reservation)
        self.blocks_freed()

    # --- prefill side

    async def _on_prefill(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        self._worker.check()
        request = unpack_request(body, data, time.monotonic())
        if request.request_id in self._fenced:
            raise RemoteError("the request was cancelled before it started", code="gone")
        self._own_load.keep(body["promise"], request)
        if len(self._worker.batcher.waiting) >= self._max_waiting:
            raise RemoteError(
                f"{self._max_waiting} requests wait on {self._node_id} already",
                "overloaded",
                {"retry_after_s": self._own_load.room_in_s()},
            )
        transfer = None
        if body["target"] is not None:
            target = KvTarget(**body["target"])
            ready = KvReady(self._geometry, target, request.num_tokens, self._kv_overlap)
            mover = self._mover(request.request_id, target)
            transfer = KvTransfer(target.node, mover, ready, self._worker.batcher.pool, self._wire)
            request.handover = True
        self._acceptors[request.request_id] = peer
        self._worker.add(request, transfer)

    def _mover(self, request_id: str, target: KvTarget) -> Mover:
        region = KV_REGION if self._wire is None else self._wire.region.name
        if self._kv_transfer == "pull":
            return PullOffer(self._channel, region, request_id, target, MOVE_TIMEOUT_S)
        push = Push(self._transfer, region, target, MOVE_TIMEOUT_S)
        return push if self._wire is None else EncodedPush(push, self._channel, request_id, target, MOVE_TIMEOUT_S)

    async def _hand_over(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """After the last layer: wait until all KV has landed, then let the decode node go on."""
        begin = time.monotonic()
        try:
            report = await transfer.finish()
            if self._kv_transfer == "push":  # a pull is counted where it is done
                self._metrics.count_transfer("write", report.transport, report.nbytes, report.seconds)
            now = time.monotonic()
            detail = {
                "how": self._kv_transfer,
                "overlap": self._kv_overlap,
                "bytes": report.nbytes,
                "batches": report.batches,
                "transport": report.transport,
                "seconds": report.seconds,
                "exposed_seconds": now - begin,  # from the end of the prefill until all had landed
                "intervals": report.intervals.before(now),
            }
            if self._wire is not None:
                detail |= {"wire_dtype": self._wire.dtype, "saved_bytes": report.saved}
                self._metrics.count_wire_saved(report.saved)
            request.log.append((now, "kv_moved", detail))
            # Told now: the decode node may have made a short answer before it has answered here.
            self._send(acceptor, [[request.request_id, -1, None, None, "landed", self._extra(request)]])
            await self._channel.call(
                transfer.node,
                messages.HANDOVER,
                {"id": request.request_id, "first_token": request.token_ids[-1]},
            )
        except Exception as error:
            await transfer.stop()
            end = "refused" if isinstance(error, RemoteError) and error.code == "refused" else "failed"
            told = self._extra(request, str(error))
            if end == "refused":
                told["refused"] = error.facts  # type: ignore[attr-defined]
            self._send(acceptor, [[request.request_id, -1, None, None, end, told]])
            self._metrics.count_transfer_failure(transfer.report.transport or "none")
            log.info("handover of %s to %s failed: %s", request.request_id, transfer.node, error)
        else:
            self._remember(request, transfer.node)
            # Only now does the acceptor stop watching this node.
            self._send(acceptor, [[request.request_id, -1, None, None, "handed_over", None]])
        finally:
            self._leaving.pop(request.request_id, None)

    def _remember(self, request: Request, node: str) -> None:
        """The next turn of a chat wants what `node` computes now."""
        full = (request.num_tokens - 1) // self._geometry.block_size
        if self._arenas is not None and full:
            self._arenas.handed_over(request.block_keys(self._geometry.block_size)[full - 1], node)

    async def _on_fence(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        await self._cancel(body["id"])
        return {}

    async def _cancel(self, request_id: str) -> None:
        """After this, nothing of the request is computed or moved here."""
        self._fenced[request_id] = None
        while len(self._fenced) > MAX_FENCED_IDS:
            self._fenced.popitem(last=False)
        self._worker.abort(request_id)
        if (transfer := self._worker.take_transfer(request_id)) is not None:
            await self._stop_transfer(request_id, transfer)
        elif (transfer := self._leaving.get(request_id)) is not None:
            await transfer.stop()

    async def _stop_transfer(self, request_id: str, transfer: KvTransfer) -> None:
        """A request ended before its KV was wanted elsewhere."""
        self._leaving[request_id] = transfer
        try:
            await transfer.stop()
        finally:
            self._leaving.pop(request_id, None)

    # --- ends

    async def _on_abort(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        for request_id in body["ids"]:
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
        """`node` is gone: what it accepted ends here, or waits for its client; what it was sending will not come."""
        for request_id in [r for r, acceptor in self._acceptors.items() if acceptor == node]:
            if self._orphans.keep(request_id):
                self._acceptors[request_id] = NOBODY
            else:
                self._end(request_id)
        for request in self._incoming.of_node(node):
            acceptor = self._acceptors.get(request.request_id)
            self._end(request.request_id)
            if acceptor is not None:
                note = self._extra(request, f"prefill node {node} was lost")
                self._send(acceptor, [[request.request_id, -1, None, None, "failed", note]])

    def blocks_freed(self) -> None:
        """Let a waiting reservation or request try again."""
        self._incoming.blocks_freed()
        self._worker.wake()

    async def close(self) -> None:
        self._orphans.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._incoming.close()
        self._lending.close()

    # --- tokens to their acceptors

    def on_emissions(self, emissions: Sequence[Emission]) -> None:
        """Called by the worker once per step: one message per acceptor."""
        items: defaultdict[str, list[list[Any]]] = defaultdict(list)
        for emission in emissions:
            request = emission.request
            acceptor = self._acceptors.get(request.request_id)
            reason = request.finish_reason
            ends = request.finished and not emission.num_behind
            transfer = self._worker.take_transfer(request.request_id) if ends else None
            if acceptor is None:
                if transfer is not None:
                    self._spawn(self._stop_transfer(request.request_id, transfer))
                continue
            if request.prompt_logprobs and emission.token_id is not None and request.num_output_tokens == 1:
                self._channel.post(acceptor, messages.PROMPT_LOGPROBS, *pack_prompt_logprobs(request))
            items[acceptor].append(item(emission, self._node_id, time.monotonic()))
            if reason == "handover" and transfer is not None:
                self._leaving[request.request_id] = transfer
                self._spawn(self._hand_over(request, transfer, acceptor))
            elif transfer is not None:
                self._spawn(self._stop_transfer(request.request_id, transfer))
            if ends:
                if reason in ("stop", "length"):
                    self._own_load.load.lengths.ended(request.num_output_tokens)
                    self._orphans.ended(request)
                del self._acceptors[request.request_id]
        items.pop(NOBODY, None)
        for acceptor, batch in items.items():
            self._send(acceptor, batch)
        self.blocks_freed()

    def _extra(self, request: Request, error: str | None = None) -> dict[str, Any]:
        return extra(request, self._node_id, time.monotonic(), error)

    def _send(self, acceptor: str, items: list[list[Any]]) -> None:
        self._channel.post(acceptor, messages.TOKENS, {"items": items})

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = spawn(coroutine, "ending or handing over a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def owed(self) -> int:
        """Requests that an acceptor waits for; those whose acceptor was lost are not among them."""
        return sum(acceptor != NOBODY for acceptor in self._acceptors.values()) + len(self._leaving)

    def held_blocks(self) -> Iterator[int]:
        """One for each transfer reference that is held here; those of the worker's transfers are its own."""
        yield from self._incoming.held_blocks()
        yield from self._lending.held_blocks()
        for transfer in self._leaving.values():
            yield from transfer.held_blocks()

    def held(self) -> dict[str, int]:
        """What is still held for requests; all zero on an idle node."""
        return {
            "requests": len(self._worker.batcher.requests),
            "incoming": len(self._incoming),
            "leaving": len(self._leaving),
            "lent": len(self._lending),
            "acceptors": len(self._acceptors),
        }
