"""Prompts computed here whose KV goes to a decode node: how it moves, who learns of its end, and how it stops.

A transfer is made with its request and belongs to the worker while steps compute it (engine/core/worker.py). When the
request ends here, its transfer is kept in this file until no byte of it is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from engine.core.kv_ready import KV_REGION, KvReady, KvTarget
from engine.core.kv_transfer import KvTransfer, Mover
from engine.handoff import messages
from engine.handoff.arenas import Arenas
from engine.handoff.items import report_of
from engine.handoff.messages import Handover
from engine.handoff.pull import PullOffer
from engine.handoff.push import EncodedPush, Push
from engine.handoff.rail_news import RailNews
from engine.handoff.updates import Failed, HandedOver, Landed, Refused, Report, Update
from engine.prefill_group.messages import LANDED as PART_LANDED
from engine.prefill_group.messages import Landed as PartLanded
from engine.step.part import Part
from engine.step.request import Request
from net.bodies import encode
from net.channel.channel import Channel, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from net.transfer.engine import TransferEngine

if TYPE_CHECKING:
    from engine.handoff.converting import Converted, Converter
    from engine.handoff.wire import WireCodec

log = logging.getLogger("mooncake.engine")

MOVE_TIMEOUT_S = 30.0  # per batch
HANDOVER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class KvMoves:
    """How KV computed here moves to decode nodes, and the rates of the rails."""

    geometry: BlockGeometry
    rails: RailNews
    how: str = "push"  # --kv-transfer
    overlap: str = "layer"  # --kv-overlap
    arenas: Arenas | None = None  # remembers the decode nodes of prompts
    wire: WireCodec | None = None  # encodes KV for the wire and decodes it; None: KV moves as it is
    unlike: Converter | None = None  # converts KV for nodes whose blocks differ; None: it cannot be converted here
    key_tokens: int = 0  # as in Request
    prefills: bool = False  # this node computes prompts

    @property
    def pooled_per_block(self) -> int:
        """Blocks of the pool in one of this node's."""
        return self.geometry.block_size // self.key_tokens if self.key_tokens else 1


Tell = Callable[[str, Request, Update], None]
"""(acceptor, request, update): behind all earlier updates of the request."""


class Outgoing:
    """Transfers to decode nodes. `tell` reaches acceptors, `freed()` says that blocks may be free again."""

    def __init__(
        self,
        channel: Channel,
        transfer: TransferEngine,
        moves: KvMoves,
        metrics: Metrics,
        tell: Tell,
        freed: Callable[[], None],
    ) -> None:
        self._channel, self._transfer, self._moves, self._metrics = channel, transfer, moves, metrics
        self._tell, self._freed = tell, freed
        self._leaving: dict[str, KvTransfer] = {}  # of ended requests, while bytes are in flight
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of requests that have ended here and whose KV is still in flight."""
        return len(self._leaving)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""
        for transfer in self._leaving.values():
            yield from transfer.held_blocks()

    # --- while it is computed

    def transfer(self, request: Request, target: KvTarget, pool: BlockPool) -> KvTransfer:
        """The transfer of a prompt, or of its part in a group, from blocks of `pool`."""
        part = request.part
        layers = None if part is None else range(part.begin, part.end)
        converted = self._converted(target)
        seen = target if converted is None else converted.target(request.num_tokens)
        ready = KvReady(self._moves.geometry, seen, request.num_tokens, self._moves.overlap, layers)
        encoder = self._moves.wire if converted is None else converted
        made = KvTransfer(target.node, self.mover(request.request_id, target, converted), ready, pool, encoder)
        if part is not None:
            made.watch(partial(self._part_landed, request, part, target.node))
        return made

    def _converted(self, target: KvTarget) -> Converted | None:
        """None: the blocks of that node are like those of this one."""
        unlike, own = self._moves.unlike, self._moves.geometry
        if not target.dtype or (target.dtype, target.block_size) == (own.dtype, own.block_size):
            return None
        if unlike is None:
            raise RemoteError(f"{self._channel.node_id} cannot convert its KV for {target.node}", code="layout")
        return unlike.onto(target)

    def mover(self, request_id: str, target: KvTarget, converted: Converted | None = None) -> Mover:
        """Moves KV of this node's arena into the blocks of `target`."""
        if converted is not None:
            if self._moves.how == "pull":
                return PullOffer(self._channel, converted.region, request_id, target, MOVE_TIMEOUT_S, encoded=False)
            return Push(self._transfer, converted.region, target, MOVE_TIMEOUT_S)
        wire = self._moves.wire
        region = KV_REGION if wire is None else wire.region.name
        if self._moves.how == "pull":
            return PullOffer(self._channel, region, request_id, target, MOVE_TIMEOUT_S)
        push = Push(self._transfer, region, target, MOVE_TIMEOUT_S)
        return push if wire is None else EncodedPush(push, self._channel, request_id, target, MOVE_TIMEOUT_S)

    def _part_landed(self, request: Request, part: Part, decode: str, tokens: int) -> None:
        owed = PartLanded(request.request_id, part.owed_from(tokens, request.num_tokens))
        self._channel.post(decode, PART_LANDED, encode(owed))

    # --- when it has been computed

    def hand_over(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """The request has its first token: the decode node gets it behind the KV."""
        self._leaving[request.request_id] = transfer
        self._spawn(self._hand_over(request, transfer, acceptor))

    async def _hand_over(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """After the last layer: wait until all KV has landed, then tell the decode node to continue."""
        begin = time.monotonic()
        try:
            await self._moved(request, transfer, begin)
            # Sent before the call: the decode node may finish a short answer before it replies here.
            self._tell(acceptor, request, Landed(self._report(request)))
            handover = Handover(request.request_id, request.token_ids[-1], request.private)
            patience_s = HANDOVER_TIMEOUT_S if request.part is None else MOVE_TIMEOUT_S  # for the other nodes' KV
            await self._channel.call(transfer.node, messages.HANDOVER, encode(handover), timeout_s=patience_s)
        except Exception as error:
            await self._failed(request, transfer, acceptor, error)
        else:
            self._remember(request, transfer.node)
            # Only then may the acceptor stop watching this node.
            self._tell(acceptor, request, HandedOver())
        finally:
            self._leaving.pop(request.request_id, None)

    def deliver(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        """This node has computed its part of the prompt, and another one of its group hands over. The last news to the
        decode node leaves with the last piece."""
        self._leaving[request.request_id] = transfer
        self._spawn(self._deliver(request, transfer, acceptor))

    async def _deliver(self, request: Request, transfer: KvTransfer, acceptor: str) -> None:
        begin = time.monotonic()
        try:
            await self._moved(request, transfer, begin)
            self._tell(acceptor, request, Landed(self._report(request)))
        except Exception as error:
            await self._failed(request, transfer, acceptor, error)
        finally:
            self._leaving.pop(request.request_id, None)
            self._freed()

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
        if transfer.encoder is not None:
            notes = transfer.encoder.notes(report)
            detail |= notes
            self._metrics.count("mooncake:wire_saved_bytes", notes.get("saved_bytes", 0))
        request.journal.note(now, "kv_moved", detail)

    async def _failed(self, request: Request, transfer: KvTransfer, acceptor: str, error: Exception) -> None:
        await transfer.stop()
        self._tell(acceptor, request, _why_not(error, self._report(request)))
        self._metrics.count("mooncake:transfer_failures", transport=transfer.report.transport or "none")
        log.info("KV of %s did not reach %s, or it did not take over: %s", request.request_id, transfer.node, error)

    def _remember(self, request: Request, node: str) -> None:
        """Remember the decode node: the next turn of a chat needs the KV that `node` computes now."""
        size, arenas = self._moves.geometry.block_size, self._moves.arenas
        full = (request.num_tokens - 1) // size
        if arenas is not None and full:
            arenas.handed_over(request.block_keys(size)[full - 1], node)

    def _report(self, request: Request) -> Report:
        return report_of(request, self._channel.node_id, time.monotonic())

    # --- ends

    async def stop(self, request_id: str, transfer: KvTransfer | None) -> None:
        """Once this returns, nothing of the request moves any more. `transfer`: of a request that was still computed;
        None: it had ended."""
        if transfer is not None:
            await self._stop(request_id, transfer)
        elif (leaving := self._leaving.get(request_id)) is not None:
            await leaving.stop()

    def stop_soon(self, request_id: str, transfer: KvTransfer) -> None:
        """Stop the transfer of a request that ended without a handover."""
        self._leaving[request_id] = transfer  # at once: a fence that comes before the task runs must wait for it
        self._spawn(self._stop(request_id, transfer))

    async def _stop(self, request_id: str, transfer: KvTransfer) -> None:
        self._leaving[request_id] = transfer
        try:
            await transfer.stop()
        finally:
            self._leaving.pop(request_id, None)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = spawn(coroutine, "handing over a request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _why_not(error: Exception, report: Report) -> Failed | Refused:
    """The update for the acceptor after a failed handover."""
    match error:
        case RemoteError(code="refused", facts={"retry_after_s": float() | int() as retry_after_s}):
            return Refused(error.reason, retry_after_s, error.facts, report)
    return Failed(str(error), report)
