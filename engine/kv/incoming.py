"""The decode node's side of a prompt that another node computes: blocks for it, and what becomes of them.

reserve    wait for blocks in order of arrival; they are held with transfer references from now on
pull       read a part of the KV out of the prefill node's blocks (with --kv-transfer push it writes them itself)
arrive     handover: everything has landed, the request decodes
give_up    the request has ended: the blocks go back once nobody can write to them any more
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cache.block import BlockGeometry
from cache.pool import OutOfBlocks
from engine.kv.pull import KvPull
from engine.request import Request
from engine.serving import messages
from engine.worker import Worker
from net.channel import Channel
from net.errors import RemoteError
from net.metrics import Metrics
from net.spans import unpack_spans
from net.transfer import TransferEngine, TransferError

KV_REGION = "kv"
BLOCKED_RETRY_S = 0.02
FENCE_TIMEOUT_S = 60.0


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
        geometry: BlockGeometry,
        max_waiting: int,
        metrics: Metrics,
        cancelled: Callable[[str], bool],
    ) -> None:
        """cancelled(request id): it ended while it waited for blocks."""
        self._channel = channel
        self._transfer = transfer
        self._worker = worker
        self._geometry = geometry
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._cancelled = cancelled
        self._reservations: dict[str, Reservation] = {}
        self._order = asyncio.Lock()  # reservations wait for blocks in order of arrival
        self._num_waiting = 0
        self._blocks_freed = asyncio.Event()
        channel.handle(messages.PULL, self._on_pull)

    def __len__(self) -> int:
        return len(self._reservations)

    def check_room(self, retry_after_s: Callable[[], float]) -> None:
        """Raises RemoteError when as many wait as may; `retry_after_s`: until one of them has its blocks."""
        if self._num_waiting >= self._max_waiting:
            raise RemoteError(
                f"{self._max_waiting} requests wait for KV blocks of {self._channel.node_id}",
                "overloaded",
                {"retry_after_s": retry_after_s()},
            )

    async def reserve(self, request: Request, prefill_node: str) -> dict[str, Any]:
        """Blocks for the prompt: the fields of KvTarget but `node`. Raises RemoteError when it ended meanwhile."""
        self._num_waiting += 1
        try:
            first_missing = await self._blocks_for(request)
        finally:
            self._num_waiting -= 1
        held = request.block_ids[first_missing:]
        self._worker.batcher.pool.hold(held)
        pull = KvPull(self._transfer, KV_REGION, self._geometry.block_bytes, prefill_node, held)
        self._reservations[request.request_id] = Reservation(request, held, prefill_node, pull)
        return {"region": KV_REGION, "blocks": request.block_ids, "first_missing": first_missing}

    async def _blocks_for(self, request: Request) -> int:
        async with self._order:
            while not self._cancelled(request.request_id):
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

    def blocks_freed(self) -> None:
        """Let a waiting reservation try again."""
        self._blocks_freed.set()

    async def _on_pull(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        reservation = self._reservations.get(body["id"])
        if reservation is None or reservation.prefill_node != peer:
            raise RemoteError("the request has ended on the decode node", code="gone")
        try:
            done = await reservation.pull.read(body["region"], unpack_spans(data), body["timeout_s"])
        except (ConnectionError, TimeoutError, TransferError) as error:
            raise RemoteError(f"reading the KV failed: {error}", code="transfer") from None
        self._metrics.count_transfer("read", done.transport, done.nbytes, done.seconds)
        return {"bytes": done.nbytes, "seconds": done.seconds, "transport": done.transport}

    def arrive(self, request_id: str, first_token: int) -> None:
        """All KV has landed. Raises RemoteError when the request has ended."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.pool.unhold(reservation.held)
        request = reservation.request
        if request.finished:
            raise RemoteError("the request has ended on the decode node", code="gone")
        self._worker.batcher.arrived(time.monotonic(), request, first_token)
        self._worker.wake()

    def request(self, request_id: str) -> Request | None:
        """The request of a reservation."""
        reservation = self._reservations.get(request_id)
        return None if reservation is None else reservation.request

    def of_node(self, prefill_node: str) -> list[Request]:
        """Requests whose KV comes from that node."""
        return [one.request for one in self._reservations.values() if one.prefill_node == prefill_node]

    def take(self, request_id: str) -> Reservation | None:
        """The request has ended: no further read starts. `give_up` what is returned."""
        return self._reservations.pop(request_id, None)

    async def give_up(self, reservation: Reservation) -> None:
        """Let the blocks go: behind our own reads, and behind the prefill node's word that it will not write, or the
        fence of its lost connection."""
        await reservation.pull.stop()
        try:
            await self._channel.call(
                reservation.prefill_node,
                messages.FENCE,
                {"id": reservation.request.request_id},
                timeout_s=FENCE_TIMEOUT_S,
            )
        except (ConnectionError, RemoteError, TimeoutError):
            await self._transfer.fence(reservation.prefill_node)  # it cannot tell; make sure that nothing lands
        self._worker.batcher.pool.unhold(reservation.held)

    async def close(self) -> None:
        for reservation in self._reservations.values():
            await reservation.pull.stop()
            self._worker.batcher.pool.unhold(reservation.held)
        self._reservations.clear()
