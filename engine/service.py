"""What other nodes may ask of an engine node: probe, reserve, prefill, handover, abort, fence.

Who pushes into whose blocks, and when those blocks may be used again, is decided here:

- a decode node holds reserved blocks with transfer references until the prefill node says that all KV has landed
  (handover), answers that it will push no more (fence), or is lost (its connection is gone, so nothing can land);
- every request belongs to its acceptor: when that is lost, its requests end here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cache.block import KEY_BYTES, BlockGeometry
from cache.pool import OutOfBlocks
from engine import messages
from engine.messages import pack_events, pack_logprobs, unpack_request
from engine.push import KvPush, PushTarget
from engine.request import Request
from engine.worker import Emission, Worker
from net.channel import Channel, RemoteError
from net.metrics import Metrics
from net.transfer import TransferEngine

log = logging.getLogger("mooncake.engine")

KV_REGION = "kv"
PUSH_TIMEOUT_S = 30.0
BLOCKED_RETRY_S = 0.02
MAX_FENCED_IDS = 4096


@dataclass(slots=True)
class _Incoming:
    """A reserved request whose KV is on its way."""

    request: Request
    held: list[int]
    prefill_node: str


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
        load: Callable[[], dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        self._node_id = node_id
        self._channel = channel
        self._transfer = transfer
        self._worker = worker
        self._geometry = geometry
        self._max_waiting = max_waiting
        self._load = load
        self._metrics = metrics
        self._acceptors: dict[str, str] = {}  # request id -> node
        self._incoming: dict[str, _Incoming] = {}
        self._pushing: dict[str, KvPush] = {}  # of requests that have ended here, until nothing of them is in flight
        self._fenced: OrderedDict[str, None] = OrderedDict()  # ids that may not start pushing any more
        self._reserving = asyncio.Lock()  # reservations wait for blocks in order of arrival
        self._num_reserving = 0
        self._blocks_freed = asyncio.Event()
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
        keys = [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
        matched = self._worker.batcher.pool.match(keys) if self._worker.batcher.blocks.prefix_caching else []
        return self._load() | {"local_tokens": len(matched) * self._geometry.block_size}

    # --- decode side

    async def _on_reserve(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        request = unpack_request(body, data, time.monotonic())
        if self._num_reserving >= self._max_waiting:
            raise RemoteError(f"{self._max_waiting} requests wait for KV blocks of {self._node_id}", code="overloaded")
        self._acceptors[request.request_id] = peer
        self._num_reserving += 1
        try:
            first_missing = await self._reserve(request)
        finally:
            self._num_reserving -= 1
        held = request.block_ids[first_missing:]
        self._worker.batcher.pool.hold(held)
        self._incoming[request.request_id] = _Incoming(request, held, body["prefill_node"])
        return {"region": KV_REGION, "blocks": request.block_ids, "first_missing": first_missing}

    async def _reserve(self, request: Request) -> int:
        """Wait for blocks in order of arrival. Raises RemoteError when the request was aborted meanwhile."""
        async with self._reserving:
            while request.request_id not in self._fenced:
                try:
                    return self._worker.batcher.reserve(time.monotonic(), request)
                except OutOfBlocks:
                    await self._wait_for_blocks()
        raise RemoteError("the request was cancelled before it had blocks", code="gone")

    async def _wait_for_blocks(self) -> None:
        """Until a request ended here; transfers free blocks without telling, so look again soon anyway."""
        self._blocks_freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCKED_RETRY_S):
                await self._blocks_freed.wait()

    async def _on_handover(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        incoming = self._incoming.pop(body["id"], None)
        if incoming is None:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.pool.unhold(incoming.held)
        request = incoming.request
        if request.finished:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.arrived(time.monotonic(), request, body["first_token"])
        self._worker.wake()

    async def _fence_incoming(self, incoming: _Incoming) -> None:
        """Give the slots of an ended reservation back once its writer has stopped."""
        try:
            await self._channel.call(
                incoming.prefill_node, messages.FENCE, {"id": incoming.request.request_id}, timeout_s=60.0
            )
        except (ConnectionError, RemoteError, TimeoutError):
            await self._transfer.fence(incoming.prefill_node)  # it cannot tell; make sure that nothing lands
        self._worker.batcher.pool.unhold(incoming.held)
        self.blocks_freed()

    # --- prefill side

    async def _on_prefill(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        request = unpack_request(body, data, time.monotonic())
        if request.request_id in self._fenced:
            raise RemoteError("the request was cancelled before it started", code="gone")
        if len(self._worker.batcher.waiting) >= self._max_waiting:
            raise RemoteError(f"{self._max_waiting} requests wait on {self._node_id} already", code="overloaded")
        push = None
        if body["target"] is not None:
            push = KvPush(
                self._transfer,
                self._worker.batcher.pool,
                self._geometry,
                KV_REGION,
                PushTarget(**body["target"]),
                PUSH_TIMEOUT_S,
            )
            request.handover = True
        self._acceptors[request.request_id] = peer
        self._worker.add(request, push)

    async def _hand_over(self, request: Request, push: KvPush, acceptor: str) -> None:
        """After the last layer: wait until all KV has landed, then let the decode node go on."""
        begin = time.monotonic()
        try:
            report = await push.finish()
            self._metrics.count_transfer("write", report.transport, report.nbytes, report.seconds)
            detail = {
                "bytes": report.nbytes,
                "batches": report.batches,
                "transport": report.transport,
                "seconds": report.seconds,
                "exposed_seconds": time.monotonic() - begin,  # what compute did not hide
            }
            request.log.append((time.monotonic(), "kv_pushed", detail))
            await self._channel.call(
                push.target.node,
                messages.HANDOVER,
                {"id": request.request_id, "first_token": request.token_ids[-1]},
            )
        except Exception as error:
            await push.stop()
            self._send(acceptor, [[request.request_id, -1, None, None, "failed", self._extra(request, str(error))]])
            self._metrics.count_transfer_failure(report.transport if (report := push.report).transport else "none")
            log.info("handover of %s to %s failed: %s", request.request_id, push.target.node, error)
        else:
            # Only now does the acceptor stop watching this node.
            self._send(acceptor, [[request.request_id, -1, None, None, "handed_over", self._extra(request)]])
        finally:
            self._pushing.pop(request.request_id, None)

    async def _on_fence(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        await self._cancel(body["id"])
        return {}

    async def _cancel(self, request_id: str) -> None:
        """After this, nothing of the request is computed or pushed here."""
        self._fenced[request_id] = None
        while len(self._fenced) > MAX_FENCED_IDS:
            self._fenced.popitem(last=False)
        self._worker.abort(request_id)
        push = self._worker.take_push(request_id) or self._pushing.get(request_id)
        if push is not None:
            await push.stop()

    async def _stop_push(self, request_id: str, push: KvPush) -> None:
        """A request ended before its KV was wanted elsewhere."""
        self._pushing[request_id] = push
        await push.stop()
        self._pushing.pop(request_id, None)

    # --- ends

    async def _on_abort(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        for request_id in body["ids"]:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._acceptors.pop(request_id, None)
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None:
            self._worker.abort(request_id)
            self._spawn(self._fence_incoming(incoming))
        else:
            self._spawn(self._cancel(request_id))
        self.blocks_freed()

    def peer_lost(self, node: str) -> None:
        """`node` is gone: what it accepted ends here, what it was pushing will not come."""
        for request_id in [r for r, acceptor in self._acceptors.items() if acceptor == node]:
            self._end(request_id)
        for incoming in [i for i in self._incoming.values() if i.prefill_node == node]:
            acceptor = self._acceptors.get(incoming.request.request_id)
            self._end(incoming.request.request_id)
            if acceptor is not None:
                note = self._extra(incoming.request, f"prefill node {node} was lost")
                self._send(acceptor, [[incoming.request.request_id, -1, None, None, "failed", note]])

    def blocks_freed(self) -> None:
        """Let a waiting reservation or request try again."""
        self._blocks_freed.set()
        self._worker.wake()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for incoming in self._incoming.values():
            self._worker.batcher.pool.unhold(incoming.held)
        self._incoming.clear()

    # --- tokens to their acceptors

    def on_emissions(self, emissions: Sequence[Emission]) -> None:
        """Called by the worker once per step: one message per acceptor."""
        items: defaultdict[str, list[list[Any]]] = defaultdict(list)
        for emission in emissions:
            request = emission.request
            acceptor = self._acceptors.get(request.request_id)
            reason = request.finish_reason
            ends = request.finished and not emission.num_behind
            push = self._worker.take_push(request.request_id) if ends else None
            if acceptor is None:
                if push is not None:
                    self._spawn(self._stop_push(request.request_id, push))
                continue
            items[acceptor].append(self._item(emission))
            if reason == "handover" and push is not None:
                self._pushing[request.request_id] = push
                self._spawn(self._hand_over(request, push, acceptor))
            elif push is not None:
                self._spawn(self._stop_push(request.request_id, push))
            if ends:
                del self._acceptors[request.request_id]
        for acceptor, batch in items.items():
            self._send(acceptor, batch)
        self.blocks_freed()

    def _item(self, emission: Emission) -> list[Any]:
        """[id, index, token, logprobs, finish, extra]; `extra` comes with the first and the last token."""
        request = emission.request
        behind = emission.num_behind
        finish = None if behind or request.finish_reason == "handover" else request.finish_reason
        index = request.num_output_tokens - 1 - behind
        extra = None
        if emission.error or finish or request.first_output_index == index:
            extra = self._extra(request, emission.error)
        if emission.error:
            return [request.request_id, -1, None, None, "failed", extra]
        return [request.request_id, index, emission.token_id, pack_logprobs(emission.logprobs), finish, extra]

    def _extra(self, request: Request, error: str | None = None) -> dict[str, Any]:
        events = pack_events(request, self._node_id)
        request.log.clear()
        return {"cached_tokens": request.num_cached, "events": events, "error": error}

    def _send(self, acceptor: str, items: list[list[Any]]) -> None:
        self._channel.post(acceptor, messages.TOKENS, {"items": items})

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def held(self) -> dict[str, int]:
        """What is still held for requests; all zero on an idle node."""
        return {
            "requests": len(self._worker.batcher.requests),
            "incoming": len(self._incoming),
            "pushing": len(self._pushing),
            "acceptors": len(self._acceptors),
        }
