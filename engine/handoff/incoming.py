"""The decode node's side of a prompt that another node computes: it reserves blocks, and releases or uses them.

reserve    waits for blocks in queue order, then holds them with transfer references
pull       reads a part of the KV from the prefill node's blocks (with --kv-transfer push, that node writes it)
decode     with --wire-dtype and push: decodes the bytes that the prefill node has written
arrive     handover: all KV has landed, and the request decodes
give_up    the request has ended: frees the blocks once no node can write to them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.layer_groups import GONE
from cache.pool.block_pool import OutOfBlocks
from engine.core.kv_ready import KV_REGION, KvTarget
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.messages import Decode, Fence, Pull, Pulled
from engine.handoff.pull import Decoder, KvPull
from engine.step.request import Request
from net.bodies import encode, typed
from net.channel.channel import Channel
from net.errors import RemoteError
from net.metrics.events import Metrics
from net.transfer.common.spans import unpack_spans
from net.transfer.engine import TransferEngine, TransferError

log = logging.getLogger("mooncake.engine")

BLOCKED_RETRY_S = 0.02
FENCE_REPLY_TIMEOUT_S = 60.0  # for a live prefill node to confirm that it has stopped writing
FENCE_WARNING_INTERVAL_S = 10.0  # between warnings about a dropped node that may still be writing


@dataclass(frozen=True, slots=True)
class KvForm:
    """The form in which KV arrives."""

    block_bytes: int  # of a block of the arena
    decoder: Decoder | None = None  # None: it arrives in the arena's own format


@dataclass(slots=True)
class Reservation:
    """A request whose KV is on its way."""

    request: Request
    held: list[int]
    prefill_node: str
    pull: KvPull


class Incoming:
    """All reservations of a node."""

    def __init__(
        self,
        channel: Channel,
        transfer: TransferEngine,
        worker: Worker,
        form: KvForm,
        max_waiting: int,
        metrics: Metrics,
        cancelled: Callable[[str], bool],
    ) -> None:
        """cancelled(request id): whether the request ended while it waited for blocks."""
        self._channel = channel
        self._transfer = transfer
        self._worker = worker
        self._form = form
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._cancelled = cancelled
        self._reservations: dict[str, Reservation] = {}
        self._ending: dict[int, Reservation] = {}  # given up, but a node may still write to the blocks
        self._num_waiting = 0
        self._turns: dict[str, asyncio.Future[None]] = {}  # one per request that waits for blocks
        self._look: asyncio.TimerHandle | None = None
        channel.handle(messages.PULL, typed(Pull, self._on_pull))
        channel.handle(messages.DECODE, typed(Decode, self._on_decode))

    def __len__(self) -> int:
        return len(self._reservations) + len(self._ending)

    def held_blocks(self) -> Iterator[int]:
        """Block ids held for prefill nodes, one item per transfer reference."""
        for reservation in [*self._reservations.values(), *self._ending.values()]:
            yield from reservation.held

    def check_room(self, retry_after_s: Callable[[], float]) -> None:
        """Raises RemoteError if `max_waiting` requests already wait. `retry_after_s()` estimates when the next of them
        gets its blocks."""
        if self._num_waiting >= self._max_waiting:
            raise RemoteError(
                f"{self._max_waiting} requests wait for KV blocks of {self._channel.node_id}",
                "overloaded",
                {"retry_after_s": retry_after_s()},
            )

    async def reserve(self, request: Request, prefill_node: str) -> KvTarget:
        """Wait for the prompt's blocks and hold them. Raises RemoteError if the request ends while it waits."""
        self._num_waiting += 1
        try:
            first_missing = await self._blocks_for(request)
        finally:
            self._num_waiting -= 1
        held = request.block_ids[first_missing:]
        held += [block for table in request.others for block in table[first_missing:] if block != GONE]
        self._worker.batcher.pool.hold(held)
        form = self._form
        pull = KvPull(self._transfer, KV_REGION, form.block_bytes, prefill_node, held, form.decoder)
        self._reservations[request.request_id] = Reservation(request, held, prefill_node, pull)
        epoch = self._transfer.epoch_of(prefill_node)
        return KvTarget(self._channel.node_id, KV_REGION, request.block_ids, first_missing, epoch, request.others)

    async def _blocks_for(self, request: Request) -> int:
        batcher = self._worker.batcher
        batcher.claim(request)
        try:
            while not self._cancelled(request.request_id):
                if batcher.claims(time.monotonic())[0] is request:
                    with contextlib.suppress(OutOfBlocks):
                        return batcher.reserve(time.monotonic(), request)
                await self._turn(request)
        finally:
            batcher.unclaim(request)
            self.blocks_freed()  # the next request may try
        raise RemoteError("the request was cancelled before it had blocks", code="gone")

    async def _turn(self, request: Request) -> None:
        """Wait until `blocks_freed` lets the request try again. Transfers free blocks silently, so `_looked` calls it
        every BLOCKED_RETRY_S too."""
        self._worker.wake()  # the next step makes room for the first request in the order
        turn = self._turns[request.request_id] = asyncio.get_running_loop().create_future()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(BLOCKED_RETRY_S, self._looked)
        try:
            await turn
        finally:
            del self._turns[request.request_id]

    def _looked(self) -> None:
        self._look = asyncio.get_running_loop().call_later(BLOCKED_RETRY_S, self._looked) if self._turns else None
        self.blocks_freed()

    def blocks_freed(self) -> None:
        """Let the first request that waits for blocks try again, and let cancelled ones end."""
        waiting = self._worker.batcher.claims(time.monotonic()) if self._turns else []
        for place, request in enumerate(waiting):
            turn = self._turns.get(request.request_id)
            if turn is not None and not turn.done() and (place == 0 or self._cancelled(request.request_id)):
                turn.set_result(None)

    async def _on_pull(self, peer: str, body: Pull, data: memoryview) -> Pulled:
        pull = self._pull(body.id, peer)
        try:
            done = await pull.read(body.region, unpack_spans(data), body.timeout_s)
        except (ConnectionError, TimeoutError, TransferError) as error:
            raise RemoteError(f"reading the KV failed: {error}", code="transfer") from None
        self._metrics.count_transfer("read", done.transport, done.nbytes, done.seconds)
        return Pulled(done.nbytes, done.seconds, done.transport)

    async def _on_decode(self, peer: str, body: Decode, data: memoryview) -> None:
        await self._pull(body.id, peer).decode(unpack_spans(data))

    def _pull(self, request_id: str, prefill_node: str) -> KvPull:
        """The request's KvPull. Raises RemoteError if the request no longer expects KV from this node."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.prefill_node != prefill_node:
            raise RemoteError("the request has ended on the decode node", code="gone")
        return reservation.pull

    def arrive(self, request_id: str, first_token: int, private: bool = False) -> None:
        """All KV has landed: start decoding. Raises RemoteError if the request has ended."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.pool.unhold(reservation.held)
        request = reservation.request
        if request.finished:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.arrived(time.monotonic(), request, first_token, private)
        self._worker.wake()

    def request(self, request_id: str) -> Request | None:
        """The request of a reservation."""
        reservation = self._reservations.get(request_id)
        return None if reservation is None else reservation.request

    def of_node(self, prefill_node: str) -> list[Request]:
        """Requests whose KV comes from that node."""
        return [one.request for one in self._reservations.values() if one.prefill_node == prefill_node]

    def take(self, request_id: str) -> Reservation | None:
        """The request has ended: no further read starts. The caller passes the reservation to `give_up`."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            self._ending[id(reservation)] = reservation
        return reservation

    async def give_up(self, reservation: Reservation) -> None:
        """Release the blocks after our own reads have stopped and the prefill node has confirmed that it writes no
        more. A node that does not confirm is disconnected; later writes by it carry an old epoch and are refused."""
        await reservation.pull.stop()
        node, request_id = reservation.prefill_node, reservation.request.request_id
        try:
            await self._channel.call(node, messages.FENCE, encode(Fence(request_id)), timeout_s=FENCE_REPLY_TIMEOUT_S)
        except (ConnectionError, RemoteError, TimeoutError) as error:
            self._channel.drop(node, f"it did not confirm that it has stopped writing KV of {request_id}: {error}")
            await self._behind_fence(node, len(reservation.held))
        self._let_go(reservation)

    async def _behind_fence(self, node: str, num_blocks: int) -> None:
        """A stopped process on this host may write when it resumes, so wait until it has ended or resumed."""
        while True:
            try:
                await self._transfer.fence(node, FENCE_WARNING_INTERVAL_S)
                return
            except TimeoutError as error:
                log.warning("%d blocks for KV from %s are still held: %s", num_blocks, node, error)

    def _let_go(self, reservation: Reservation) -> None:
        if self._ending.pop(id(reservation), None) is not None:
            self._worker.batcher.pool.unhold(reservation.held)

    async def close(self) -> None:
        """Release everything without asking the prefill nodes: this node ends. No `give_up` may be running."""
        for request_id in list(self._reservations):
            self.take(request_id)
        for reservation in list(self._ending.values()):
            await reservation.pull.stop()
            self._let_go(reservation)
