"""Device memory in transfers: spans of a GPU's arena travel through page-locked host buffers where the network card
cannot reach the GPU itself.

    local side on a device    copy out -> buffer -> WRITE            two buffers: while one is copied the other is on
                              READ -> buffer -> copy in              the wire, so a long transfer costs the slower
                                                                     of both and not their sum
    remote side on a device   ask its node to do the opposite: our WRITE is its READ into its device, our READ its WRITE

    device.is{region}                          ──>  <── {device}
    device.move{id, op, region, other} + spans ──>  <── {nbytes, transport}
    device.stop{id}                            ──>  <── {}               nothing of it moves any more

`DeviceTransferEngine` is a transfer engine whose regions may also be DeviceRegions; submissions look the same. What it
asks of a device is the protocol `Device` of net/device_memory.py; engine/kv/cuda_memory.py is the one for CUDA.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from net.channel import Body, Channel
from net.device_memory import Chunk, Copying, Device, DeviceRegion, chunks
from net.errors import PeerLost, RemoteError, TransferError
from net.memory import Region
from net.spans import Span, merged, pack_spans, unpack_spans
from net.transfer import BULK, URGENT, Completion, Op, TransferEngine

__all__ = ["STAGED", "STAGING", "Copying", "Device", "DeviceRegion", "DeviceTransferEngine"]

STAGING = "staging"  # name of the region of buffers
STAGED = "+staging"  # behind the transport's name in a Completion
BUFFER_BYTES = 8 << 20
BUFFERS = 2  # per lane
LANES, SERVING = 3, 2
"""Lanes have buffers of their own: one per priority, as urgent transfers do not wait for bulk, and SERVING for what
peers ask, as two nodes would wait for each other's buffers for ever, each holding its own."""
STOP_S = 5.0  # a peer that does not confirm the end of a transfer for so long is dropped

Carry = Callable[[Region, Sequence[Span]], Awaitable[Completion]]
"""Moves spans between host memory here and the remote side, wherever that is."""


class DeviceTransferEngine(TransferEngine):
    """See the module, and net.transfer.TransferEngine, whose rules on the reuse of memory hold for devices too."""

    def __init__(self, channel: Channel, *args: Any, buffer_bytes: int = BUFFER_BYTES, **options: Any) -> None:
        super().__init__(channel, *args, **options)
        self._devices: dict[str, DeviceRegion] = {}
        self._remote: set[tuple[str, str]] = set()  # (peer, region) known to be on a device
        self._buffers: Region | None = None
        self._buffer_bytes = buffer_bytes
        self._free: dict[int, asyncio.Queue[int]] = {}  # per lane: offsets of buffers
        self._serving: dict[tuple[str, int], asyncio.Task[Completion]] = {}
        self._ids = count(1)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="staging")
        channel.handle("device.is", self._on_is)
        channel.handle("device.move", self._on_move)
        channel.handle("device.stop", self._on_stop)
        channel.on_lost(self._forget)
        channel.on_closed(self._forget)

    # --- regions

    def register(self, region: Region | DeviceRegion) -> None:
        """See TransferEngine; the first region of a device also takes the buffers."""
        if isinstance(region, Region):
            super().register(region)
            return
        if region.name in self._devices or region.name in self._regions:
            raise ValueError(f"a region {region.name!r} is registered already: unregister it first")
        if self._buffers is None:
            self._buffers = Region.shared(STAGING, LANES * BUFFERS * self._buffer_bytes)
            self._buffers.place = region.device.location  # cards near the device are near its buffers
            super().register(self._buffers)
            for lane in range(LANES):
                queue = self._free[lane] = asyncio.Queue[int]()
                for number in range(BUFFERS):
                    queue.put_nowait((BUFFERS * lane + number) * self._buffer_bytes)
        region.device.pin(self._buffers)
        self._devices[region.name] = region

    def unregister(self, name: str) -> None:
        """See TransferEngine."""
        region = self._devices.pop(name, None)
        if region is None:
            super().unregister(name)
        elif self._buffers is not None:
            region.device.unpin(self._buffers)

    def regions(self) -> dict[str, dict[str, Any]]:
        """See TransferEngine."""
        ours = {one.name: {"nbytes": one.nbytes, "place": one.device.location} for one in self._devices.values()}
        return super().regions() | ours

    # --- submitting

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: str,
        remote: str,
        spans: Sequence[Span],
        timeout_s: float = 30.0,
        priority: int = BULK,
    ) -> Completion:
        """See TransferEngine.submit."""
        device = self._devices.get(local)
        if device is None and (peer_id, remote) not in self._remote:
            until = time.monotonic() + timeout_s
            try:
                return await super().submit(peer_id, op, local, remote, spans, timeout_s, priority)
            except TransferError:
                if not await self._is_device(peer_id, remote):
                    raise
            timeout_s = until - time.monotonic()
        return await self._submit(peer_id, op, local, remote, spans, timeout_s, min(priority, URGENT))

    async def _submit(
        self, peer_id: str, op: Op, local: str, remote: str, spans: Sequence[Span], timeout_s: float, lane: int
    ) -> Completion:
        """One side is on a device, as far as is known."""
        device = self._devices.get(local)
        priority = URGENT if lane == URGENT else BULK
        started = time.monotonic()
        until = started + timeout_s

        async def carry(region: Region, moves: Sequence[Span]) -> Completion:
            left = until - time.monotonic()
            if (peer_id, remote) not in self._remote:
                try:
                    return await TransferEngine.submit(self, peer_id, op, region.name, remote, moves, left, priority)
                except TransferError:
                    if not await self._is_device(peer_id, remote):
                        raise
            return await self._through_peer(peer_id, op, region.name, remote, moves, left)

        try:
            async with asyncio.timeout(timeout_s):
                if device is None:
                    done = await carry(self._region(local), spans)
                else:
                    done = await self._staged(device, op, spans, carry, lane)
        except TimeoutError:
            raise TimeoutError(f"{op.value} of {local!r} with {peer_id!r} not done within {timeout_s:g} s") from None
        return Completion(done.nbytes, time.monotonic() - started, done.transport)

    async def _staged(self, region: DeviceRegion, op: Op, spans: Sequence[Span], carry: Carry, lane: int) -> Completion:
        """Every chunk takes a buffer, and gives it back when nothing of it moves any more."""
        moves, nbytes = merged(spans, region.name, region.nbytes)
        running: set[asyncio.Task[str]] = set()
        transport = "none"
        try:
            for chunk in chunks(moves, self._buffer_bytes):
                buffer = await self._free[lane].get()
                running.add(asyncio.create_task(self._chunk(region, op, chunk, buffer, lane, carry)))
                for done in [one for one in running if one.done()]:
                    running.discard(done)
                    transport = done.result()
            for task in list(running):
                transport = await task
        except BaseException:
            await _ended(running)
            raise
        return Completion(nbytes, 0.0, transport.removesuffix(STAGED) + STAGED)

    async def _chunk(self, region: DeviceRegion, op: Op, chunk: Chunk, buffer: int, lane: int, carry: Carry) -> str:
        host = self._buffers
        assert host is not None
        moves = [(here, buffer + at, length) for here, at, _, length in chunk.pieces]
        spans = [(buffer + at, there, length) for _, at, there, length in chunk.pieces]
        try:
            if op is Op.WRITE:
                await self._copied(region.device, region.device.copy_out(host, moves))
                return (await carry(host, spans)).transport
            done = await carry(host, spans)
            await self._copied(region.device, region.device.copy_in(host, moves))
            return done.transport
        finally:
            self._free[lane].put_nowait(buffer)

    async def _copied(self, device: Device, copying: Copying) -> None:
        """Return or raise only after the copies, also when cancelled. Raises TransferError."""
        if not copying.done():
            waiting = asyncio.get_running_loop().run_in_executor(self._threads, copying.wait)
            await _ended({waiting})
        try:
            copying.wait()
        except Exception as error:
            raise TransferError(f"copying from or to {device.location} failed: {error}") from None

    # --- the remote side is on a device

    async def _is_device(self, peer_id: str, region: str) -> bool:
        try:
            answer, _ = await self._channel.call(peer_id, "device.is", {"region": region})
        except RemoteError:
            return False
        if answer["device"]:
            self._remote.add((peer_id, region))
        return bool(answer["device"])

    async def _through_peer(
        self, peer_id: str, op: Op, local: str, remote: str, spans: Sequence[Span], timeout_s: float
    ) -> Completion:
        number = next(self._ids)
        body = {"id": number, "op": op.value, "region": remote, "other": local, "timeout_s": timeout_s}
        try:
            answer, _ = await self._channel.call(peer_id, "device.move", body, [pack_spans(spans)], timeout_s + STOP_S)
        except RemoteError as error:
            raise (TimeoutError if error.code == "timeout" else TransferError)(str(error)) from None
        except (asyncio.CancelledError, TimeoutError):
            await self._stop(peer_id, number)
            raise
        except PeerLost:
            if op is Op.READ:  # it was writing here
                await TransferEngine.fence(self, peer_id)
            raise
        return Completion(answer["nbytes"], 0.0, answer["transport"])

    async def _stop(self, peer_id: str, number: int) -> None:
        """Return when the peer moves nothing of it any more."""
        stopping = asyncio.ensure_future(self._channel.call(peer_id, "device.stop", {"id": number}, timeout_s=STOP_S))
        await _ended({stopping}, cancel=False)
        if stopping.exception() is not None and not isinstance(stopping.exception(), PeerLost):
            self._channel.drop(peer_id, "it does not confirm the end of a transfer")

    async def _on_is(self, peer: str, body: Body, data: memoryview) -> Body:
        return {"device": body["region"] in self._devices}

    async def _on_move(self, peer: str, body: Body, data: memoryview) -> Body:
        if body["region"] not in self._devices:
            raise RemoteError(f"region {body['region']!r} is not on a device here", "transfer")
        op = Op.READ if Op(body["op"]) is Op.WRITE else Op.WRITE
        spans = [(here, there, length) for there, here, length in unpack_spans(data)]
        move = self._submit(peer, op, body["region"], body["other"], spans, body["timeout_s"], SERVING)
        task = asyncio.ensure_future(move)
        self._serving[peer, body["id"]] = task
        try:
            done = await task
        except (TransferError, ConnectionError) as error:
            raise RemoteError(str(error), "transfer") from None
        except TimeoutError as error:
            raise RemoteError(str(error), "timeout") from None
        except asyncio.CancelledError:
            if not task.cancelled():
                await _ended({task})
                raise
            raise RemoteError("stopped", "transfer") from None
        finally:
            self._serving.pop((peer, body["id"]), None)
        return {"nbytes": done.nbytes, "transport": done.transport}

    async def _on_stop(self, peer: str, body: Body, data: memoryview) -> None:
        task = self._serving.get((peer, body["id"]))
        if task is not None:
            await _ended({task})

    # --- ends

    async def fence(self, peer_id: str, timeout_s: float = 10.0) -> None:
        """See TransferEngine.fence."""
        await _ended({task for (peer, _), task in self._serving.items() if peer == peer_id})
        await super().fence(peer_id, timeout_s)

    def _forget(self, peer_id: str) -> None:
        self._remote = {(peer, region) for peer, region in self._remote if peer != peer_id}

    async def close(self) -> None:
        """See TransferEngine.close."""
        await _ended(set(self._serving.values()))
        await super().close()
        for name in list(self._devices):
            self.unregister(name)
        if self._buffers is not None and not self._buffers.closed:
            super().unregister(STAGING)
            self._buffers.close()
        self._threads.shutdown(wait=True)


async def _ended(tasks: set[asyncio.Future[Any]] | set[asyncio.Task[Any]], cancel: bool = True) -> None:
    """Cancel all and wait for their ends, however often this wait is cancelled itself; then that is raised."""
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
            task.exception()  # seen
    if cancelled is not None:
        raise cancelled
