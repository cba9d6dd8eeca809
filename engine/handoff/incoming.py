"""The decode node's side of a prompt that another node computes: it reserves blocks, and releases or uses them.

reserve    waits for blocks in queue order, then holds them with transfer references
pull       reads a part of the KV from the prefill node's blocks (with --kv-transfer push, that node writes it)
decode     with --wire-dtype and push: decodes the bytes that the prefill node has written
landed     a node of a group has delivered its part of some tokens; whole blocks can be reused now
arrive     handover: all KV has landed, and the request decodes
give_up    the request has ended: frees the blocks once no node can write to them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cache.layer_groups import GONE
from cache.pool.block_pool import OutOfBlocks
from engine.core.kv_ready import KV_REGION, KvTarget
from engine.core.worker import Worker
from engine.handoff import messages
from engine.handoff.messages import Decode, Fence, Pull, Pulled
from engine.handoff.pull import Decoder, KvPull
from engine.prefill_group.arrival import Arrival
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
    dtype: str = ""  # of its blocks, for prefill nodes whose blocks differ
    block_size: int = 0
    prefills: bool = False  # as in KvTarget


@dataclass(slots=True)
class Reservation:
    """A request whose KV is on its way."""

    request: Request
    held: list[int]
    pulls: dict[str, KvPull]  # by the prefill node: one, or those of a group; or the decode node that it leaves
    fence: str = messages.FENCE  # the message that makes these nodes stop writing
    arrival: Arrival | None = None  # from the nodes of a group
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set when a node has delivered something, or the end

    def needs(self, node: str) -> bool:
        """Whether KV is still to come from `node`."""
        return node in self.pulls and (self.arrival is None or node in self.arrival.late())

    @property
    def moves(self) -> bool:
        """Whether it runs on that node, which goes on with it if the move fails."""
        return self.fence == messages.MOVE_FENCE


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

    async def reserve(self, request: Request, prefill_nodes: Sequence[str]) -> KvTarget:
        """Wait for the prompt's blocks and hold them. prefill_nodes: one, or those of a group. Raises
        RemoteError if the request ends while it waits."""
        self._num_waiting += 1
        try:
            first_missing = await self._blocks_for(request)
        finally:
            self._num_waiting -= 1
        return self._expect(request, prefill_nodes, first_missing, messages.FENCE)

    def _expect(self, request: Request, nodes: Sequence[str], first_missing: int, fence: str) -> KvTarget:
        """Hold the blocks behind the first `first_missing` for KV from `nodes`."""
        held = request.block_ids[first_missing:]
        held += [block for table in request.others for block in table[first_missing:] if block != GONE]
        self._worker.batcher.pool.hold(held)
        form = self._form
        pulls = {node: KvPull(self._transfer, KV_REGION, form.block_bytes, node, held, form.decoder) for node in nodes}
        arrival = Arrival(nodes, request.num_tokens) if len(pulls) > 1 else None
        self._reservations[request.request_id] = Reservation(request, held, pulls, fence, arrival)
        return self._target(request, nodes, first_missing)

    def _target(self, request: Request, nodes: Sequence[str], first_missing: int) -> KvTarget:
        epochs = [self._transfer.epoch_of(node) for node in nodes]
        target = KvTarget(
            self._channel.node_id,
            KV_REGION,
            request.block_ids,
            first_missing,
            epochs[-1],
            request.others,
            dtype=self._form.dtype,
            block_size=self._form.block_size,
            prefills=self._form.prefills,
        )
        return target if len(epochs) == 1 else replace(target, epochs=epochs)

    # --- running requests that move here (engine/migration/)

    def move_in(self, request: Request, source: str, blocks: int) -> KvTarget:
        """Hold `blocks` blocks for a request that runs on `source`. It never waits and takes nothing from requests of
        this node. Raises RemoteError if there is no room."""
        batcher = self._worker.batcher
        if len(batcher.running) + len(batcher.waiting) + len(self._reservations) >= batcher.seats.max_num_seqs:
            raise RemoteError(f"every seat of {self._channel.node_id} is taken", code="no_room")
        try:
            first_missing = batcher.reserve(time.monotonic(), request)
        except OutOfBlocks:
            raise RemoteError(f"{self._channel.node_id} has too few free blocks", code="no_room") from None
        self._expect(request, [source], first_missing, messages.MOVE_FENCE)
        try:
            return self.grow(request.request_id, source, blocks)
        except RemoteError:
            reservation = self._reservations.pop(request.request_id)
            batcher.pool.unhold(reservation.held)  # the source does not know these blocks yet
            batcher.abort(time.monotonic(), request.request_id)
            raise

    def grow(self, request_id: str, source: str, blocks: int) -> KvTarget:
        """Hold `blocks` blocks for a request that moves here, those it has included. Raises RemoteError if there is no
        room, or the request is not expected any more."""
        reservation = self._reservation(request_id, source)
        request, batcher = reservation.request, self._worker.batcher
        had = len(request.block_ids)
        try:
            batcher.blocks.extend(request, blocks * batcher.block_size)
        except OutOfBlocks:
            raise RemoteError(f"{self._channel.node_id} has too few free blocks", code="no_room") from None
        more = request.block_ids[had:]
        batcher.pool.hold(more)
        reservation.held.extend(more)
        reservation.pulls[source].allow(more)
        return self._target(request, [source], request.num_named)

    def _reservation(self, request_id: str, node: str) -> Reservation:
        reservation = self._reservations.get(request_id)
        if reservation is None or node not in reservation.pulls:
            raise RemoteError("the request has ended on the decode node", code="gone")
        return reservation

    def commit(self, request_id: str, source: str, token_ids: list[int], private: bool = False) -> Request:
        """All KV of a request that moves here has landed: go on behind these tokens. Raises RemoteError if it is not
        expected any more, or if its blocks do not suffice."""
        reservation = self._reservation(request_id, source)
        request, blocks = reservation.request, self._worker.batcher.blocks
        if len(token_ids) < request.num_tokens or blocks.blocks_for(len(token_ids) - 1) > len(request.block_ids):
            raise RemoteError(f"{len(token_ids)} tokens do not fit the reservation", code="bad_request")
        self._worker.batcher.goes_on(request, token_ids[:-1])
        self.arrive(request_id, token_ids[-1], private)
        return request

    # --- waiting for blocks

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
            done = await pull.read(body.region, unpack_spans(data), body.timeout_s, body.encoded)
        except (ConnectionError, TimeoutError, TransferError) as error:
            raise RemoteError(f"reading the KV failed: {error}", code="transfer") from None
        self._metrics.count_transfer("read", done.transport, done.nbytes, done.seconds)
        return Pulled(done.nbytes, done.seconds, done.transport)

    async def _on_decode(self, peer: str, body: Decode, data: memoryview) -> None:
        await self._pull(body.id, peer).decode(unpack_spans(data))

    def _pull(self, request_id: str, prefill_node: str) -> KvPull:
        """The request's KvPull. Raises RemoteError if the request no longer expects KV from this node."""
        return self._reservation(request_id, prefill_node).pulls[prefill_node]

    def landed(self, request_id: str, node: str, tokens: int) -> None:
        """`node` has delivered all it computes of the first `tokens` tokens. Blocks that are whole now get their names
        and go to the pool, so that a new attempt finds them if a node of the group is lost."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.arrival is None:
            return
        request = reservation.request
        reservation.arrival.landed(node, tokens)
        reservation.moved.set()
        if not request.finished and (whole := reservation.arrival.tokens) > request.num_computed:
            named = self._worker.batcher.delivered(request, whole)
            if self._form.decoder is None:  # encoded KV is not what a node would compute: it stays here
                self._worker.publish(named)

    async def all_landed(self, request_id: str) -> None:
        """Wait until all nodes of a group have delivered everything. Raises RemoteError if the request ends."""
        reservation = self._reservations.get(request_id)
        while reservation is not None and reservation.arrival is not None and not reservation.arrival.complete:
            reservation.moved.clear()
            await reservation.moved.wait()
            reservation = self._reservations.get(request_id)

    def arrive(self, request_id: str, first_token: int, private: bool = False) -> None:
        """All KV has landed: start decoding. Raises RemoteError if the request has ended, or can have no token here."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.pool.unhold(reservation.held)
        request = reservation.request
        if request.finished:
            raise RemoteError("the request has ended on the decode node", code="gone")
        reason = self._worker.batcher.arrived(time.monotonic(), request, first_token, private)
        self._worker.wake()
        if reason is not None:  # its acceptor waits for a token that would never come
            raise RemoteError(f"the request ended on {self._channel.node_id} before a token: {reason}", code="gone")

    def request(self, request_id: str) -> Request | None:
        """The request of a reservation."""
        reservation = self._reservations.get(request_id)
        return None if reservation is None else reservation.request

    def of_node(self, prefill_node: str) -> list[Reservation]:
        """Requests whose KV is still to come from that node."""
        return [one for one in self._reservations.values() if one.needs(prefill_node)]

    def take(self, request_id: str) -> Reservation | None:
        """The request has ended: no further read starts. The caller passes the reservation to `give_up`."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            self._ending[id(reservation)] = reservation
            reservation.moved.set()
        return reservation

    async def give_up(self, reservation: Reservation) -> None:
        """Release the blocks after our own reads have stopped and the prefill node has confirmed that it writes no
        more. A node that does not confirm is disconnected; later writes by it carry an old epoch and are refused."""
        await asyncio.gather(*(self._stopped(node, pull, reservation) for node, pull in reservation.pulls.items()))
        self._let_go(reservation)

    async def _stopped(self, node: str, pull: KvPull, reservation: Reservation) -> None:
        await pull.stop()
        request_id = reservation.request.request_id
        try:
            await self._channel.call(
                node, reservation.fence, encode(Fence(request_id)), timeout_s=FENCE_REPLY_TIMEOUT_S
            )
        except (ConnectionError, RemoteError, TimeoutError) as error:
            self._channel.drop(node, f"it did not confirm that it has stopped writing KV of {request_id}: {error}")
            await self._behind_fence(node, len(reservation.held))

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
            await asyncio.gather(*(pull.stop() for pull in reservation.pulls.values()))
            self._let_go(reservation)
