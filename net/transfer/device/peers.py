"""Regions of peers in device memory: their node performs the opposite operation; our WRITE is a READ into its device.

device.is{region}                          ──>  <── {device}
device.move{id, op, region, other} + spans ──>  <── {nbytes, transport}
device.stop{id}                            ──>  <── {}               nothing of it moves any more
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from net.bodies import answered, encode, typed
from net.channel.channel import Channel
from net.errors import PeerLost, RemoteError, TransferError
from net.loop.tasks import awaited
from net.transfer.common.path import Completion
from net.transfer.common.spans import Span, pack_spans, unpack_spans
from net.transfer.common.transport import Op

STOP_S = 5.0  # a peer that does not confirm the end of a transfer within this time is dropped

Move = Callable[[str, Op, str, str, Sequence[Span], float], Coroutine[Any, Any, Completion]]
"""(peer id, op, region on a device here, the peer's region, spans, timeout_s)"""


@dataclass(frozen=True, slots=True)
class IsDevice:
    region: str


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The answer to IsDevice."""

    device: bool


@dataclass(frozen=True, slots=True)
class MoveThere:
    """The body of device.move; its data contains the spans."""

    id: int
    op: str  # an Op, as the asking node sees it
    region: str  # on a device of the answering node
    other: str  # of the asking node
    timeout_s: float
    epoch: str | None = None

    def __post_init__(self) -> None:
        Op(self.op)


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer to MoveThere."""

    nbytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class StopMove:
    id: int


class DevicePeers:
    """Both ends: requests to peers, and requests of peers to this node."""

    def __init__(
        self,
        channel: Channel,
        is_device: Callable[[str], bool],
        move: Move,
        fence: Callable[[str], Awaitable[None]],
        epoch_of: Callable[[str], str],
    ) -> None:
        """is_device: whether a region of this node is on a device. move: performs a peer's request. fence, epoch_of:
        see TransferEngine."""
        self._channel = channel
        self._is_device = is_device
        self._move = move
        self._fence = fence
        self._epoch_of = epoch_of
        self._known: set[tuple[str, str]] = set()  # (peer, region) on a device there
        self._serving: dict[tuple[str, int], asyncio.Task[Completion]] = {}
        self._ids = count(1)
        channel.handle("device.is", typed(IsDevice, self._on_is))
        channel.handle("device.move", typed(MoveThere, self._on_move))
        channel.handle("device.stop", typed(StopMove, self._on_stop))
        channel.on_lost(self._forget)
        channel.on_closed(self._forget)

    # --- asking

    def known(self, peer_id: str, region: str) -> bool:
        """Whether the peer has already reported that its region is on a device."""
        return (peer_id, region) in self._known

    async def ask(self, peer_id: str, region: str) -> bool:
        """Ask the peer whether its region is on a device."""
        try:
            answer, _ = await self._channel.call(peer_id, "device.is", encode(IsDevice(region)))
            device = answered(OnDevice, answer).device
        except RemoteError:
            return False
        if device:
            self._known.add((peer_id, region))
        return device

    async def move(
        self,
        peer_id: str,
        op: Op,
        local: str,
        remote: str,
        spans: Sequence[Span],
        timeout_s: float,
        epoch: str | None = None,
    ) -> Completion:
        """Let the peer move `spans` between our region `local` and its device. Raises like TransferEngine.submit, with
        the same guarantee: nothing moves any more afterwards."""
        number = next(self._ids)
        body = encode(MoveThere(number, op.value, remote, local, timeout_s, epoch))
        try:
            answer, _ = await self._channel.call(peer_id, "device.move", body, [pack_spans(spans)], timeout_s + STOP_S)
            moved = answered(Moved, answer)
        except RemoteError as error:
            raise (TimeoutError if error.code == "timeout" else TransferError)(str(error)) from None
        except (asyncio.CancelledError, TimeoutError):
            await self._stop(peer_id, number)
            raise
        except PeerLost:
            if op is Op.READ:  # the peer was writing here
                await self._fence(peer_id)
            raise
        return Completion(moved.nbytes, 0.0, moved.transport)

    async def _stop(self, peer_id: str, number: int) -> None:
        """Return when the peer has stopped this transfer."""
        stopping = awaited(self._channel.call(peer_id, "device.stop", encode(StopMove(number)), timeout_s=STOP_S))
        await ended({stopping}, cancel=False)
        if stopping.exception() is not None and not isinstance(stopping.exception(), PeerLost):
            self._channel.drop(peer_id, "it does not confirm the end of a transfer")

    def _forget(self, peer_id: str) -> None:
        self._known = {(peer, region) for peer, region in self._known if peer != peer_id}

    # --- serving

    async def _on_is(self, peer: str, body: IsDevice, data: memoryview) -> OnDevice:
        return OnDevice(self._is_device(body.region))

    async def _on_move(self, peer: str, body: MoveThere, data: memoryview) -> Moved:
        if not self._is_device(body.region):
            raise RemoteError(f"region {body.region!r} is not on a device of this node", "transfer")
        if body.epoch is not None and body.epoch != self._epoch_of(peer):
            raise RemoteError(
                f"{self._channel.node_id!r} lost this node after it granted access to the memory", "transfer"
            )
        op = Op.READ if Op(body.op) is Op.WRITE else Op.WRITE
        spans = [(here, there, length) for there, here, length in unpack_spans(data)]
        task = awaited(self._move(peer, op, body.region, body.other, spans, body.timeout_s))
        self._serving[peer, body.id] = task
        try:
            done = await task
        except (TransferError, ConnectionError) as error:
            raise RemoteError(str(error), "transfer") from None
        except TimeoutError as error:
            raise RemoteError(str(error), "timeout") from None
        except asyncio.CancelledError:
            if not task.cancelled():
                await ended({task})
                raise
            raise RemoteError("stopped", "transfer") from None
        finally:
            self._serving.pop((peer, body.id), None)
        return Moved(done.nbytes, done.transport)

    async def _on_stop(self, peer: str, body: StopMove, data: memoryview) -> None:
        task = self._serving.get((peer, body.id))
        if task is not None:
            await ended({task})

    async def stop_serving(self, peer_id: str | None = None) -> None:
        """Return when no transfer for this peer, or for any peer if None, moves any more."""
        await ended({task for (peer, _), task in self._serving.items() if peer_id in (None, peer)})


async def ended(tasks: set[asyncio.Future[Any]] | set[asyncio.Task[Any]], cancel: bool = True) -> None:
    """Cancel all tasks and wait until they have ended, even if this wait is cancelled; then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    if cancel:
        for task in tasks:
            if isinstance(task, asyncio.Task):
                task.cancel()
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved
    if cancelled is not None:
        raise cancelled
