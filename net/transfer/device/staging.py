"""Device memory in transfers: spans of a GPU's arena pass through page-locked host buffers. This is for network cards
that cannot access the GPU directly.

    local side on a device    copy out -> buffer -> WRITE            two buffers: while one is copied, the other is on
                              READ -> buffer -> copy in              the wire, so a long transfer takes the time of
                                                                     the slower step, not the sum of both
    remote side on a device   ask its node to do the opposite (net/transfer/device/peers.py)

`DeviceTransferEngine` is a transfer engine whose regions may also be DeviceRegions; submissions look the same. Devices
implement the protocol `Device` of net/transfer/device/memory.py; engine/loading/cuda_memory.py implements it for CUDA.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from net.channel.channel import Channel
from net.errors import TransferError
from net.loop.tasks import awaited
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Span, merged
from net.transfer.device.memory import Chunk, Copying, Device, DeviceRegion, chunks
from net.transfer.device.peers import DevicePeers, ended
from net.transfer.engine import BULK, URGENT, Completion, Op, TransferEngine

__all__ = ["STAGED", "STAGING", "Copying", "Device", "DeviceRegion", "DeviceTransferEngine"]

STAGING = "device-staging"  # name of the region that contains the buffers
STAGED = "+staging"  # suffix of the transport's name in a Completion
BUFFER_BYTES = 8 << 20
BUFFERS = 2  # per lane
LANES, SERVING = 3, 2
"""Each lane has its own buffers. There is one lane per priority, because urgent transfers must not wait for bulk, and
SERVING for requests of peers: otherwise two nodes that hold their own buffers could wait for each other forever."""

Carry = Callable[[Region, Sequence[Span]], Awaitable[Completion]]
"""Moves spans between host memory here and the remote side, which may be on a device."""


class DeviceTransferEngine(TransferEngine):
    """See the module and net.transfer.engine.TransferEngine; its rules on the reuse of memory also apply to devices."""

    def __init__(self, channel: Channel, *args: Any, buffer_bytes: int = BUFFER_BYTES, **options: Any) -> None:
        super().__init__(channel, *args, **options)
        self._devices: dict[str, DeviceRegion] = {}
        self._others = DevicePeers(channel, self._devices.__contains__, self._serve, self._fence_hosts, self.epoch_of)
        self._buffers: Region | None = None
        self._buffer_bytes = buffer_bytes
        self._free: dict[int, asyncio.Queue[int]] = {}  # per lane: offsets of buffers
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="staging")

    # --- regions

    def register(self, region: Region | DeviceRegion) -> None:
        """See TransferEngine; the first region of a device also allocates the buffers."""
        if isinstance(region, Region):
            super().register(region)
            return
        if region.name in self._devices or region.name in self._regions:
            raise ValueError(f"region {region.name!r} is already registered: unregister it first")
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
        landed: LandedSpans | None = None,
        epoch: str | None = None,
    ) -> Completion:
        """See TransferEngine.submit."""
        if local not in self._devices and not self._others.known(peer_id, remote):
            until = time.monotonic() + timeout_s
            try:
                return await super().submit(peer_id, op, local, remote, spans, timeout_s, priority, landed, epoch)
            except TransferError:
                if not await self._others.ask(peer_id, remote):
                    raise
            timeout_s = until - time.monotonic()
        lane = URGENT if priority > BULK else BULK
        return await self._submit(peer_id, op, local, remote, spans, timeout_s, lane, landed or LandedSpans(), epoch)

    async def _submit(
        self,
        peer_id: str,
        op: Op,
        local: str,
        remote: str,
        spans: Sequence[Span],
        timeout_s: float,
        lane: int,
        landed: LandedSpans,
        epoch: str | None = None,
    ) -> Completion:
        """A submission with one side on a device, as far as this node knows."""
        device = self._devices.get(local)
        priority = URGENT if lane == URGENT else BULK
        started = time.monotonic()
        until = started + timeout_s

        async def carry(region: Region, moves: Sequence[Span]) -> Completion:
            left = until - time.monotonic()
            if not self._others.known(peer_id, remote):
                try:
                    return await TransferEngine.submit(
                        *(self, peer_id, op, region.name, remote, moves, left, priority), epoch=epoch
                    )
                except TransferError:
                    if not await self._others.ask(peer_id, remote):
                        raise
            return await self._others.move(peer_id, op, region.name, remote, moves, left, epoch)

        try:
            async with asyncio.timeout(timeout_s):
                if device is None:
                    done = await carry(self._region(local), spans)
                    landed.add(spans)
                else:
                    done = await self._staged(device, op, spans, carry, lane, landed)
        except TimeoutError:
            raise TimeoutError(
                f"{op.value} of {local!r} with {peer_id!r} did not finish within {timeout_s:g} s"
            ) from None
        return Completion(done.nbytes, time.monotonic() - started, done.transport)

    async def _serve(
        self, peer_id: str, op: Op, local: str, remote: str, spans: Sequence[Span], timeout_s: float
    ) -> Completion:
        """A submission that a peer requests."""
        return await self._submit(peer_id, op, local, remote, spans, timeout_s, SERVING, LandedSpans())

    async def _staged(
        self, region: DeviceRegion, op: Op, spans: Sequence[Span], carry: Carry, lane: int, landed: LandedSpans
    ) -> Completion:
        """Every chunk takes a buffer and returns it when no byte of the chunk moves any more."""
        moves, nbytes = merged(spans, region.name, region.nbytes)
        running: set[asyncio.Task[str]] = set()
        unbegun: set[int] = set()  # buffers of tasks that have not run yet: a cancelled one would never free its buffer
        transport = "none"
        try:
            for chunk in chunks(moves, self._buffer_bytes):
                buffer = await self._free[lane].get()
                unbegun.add(buffer)
                running.add(awaited(self._chunk(region, op, chunk, buffer, unbegun, lane, carry, landed)))
                for done in [one for one in running if one.done()]:
                    running.discard(done)
                    transport = done.result()
            for task in list(running):
                transport = await task
        except BaseException:
            try:
                await ended(running)
            finally:
                for buffer in unbegun:
                    self._free[lane].put_nowait(buffer)
            raise
        return Completion(nbytes, 0.0, transport.removesuffix(STAGED) + STAGED)

    async def _chunk(
        self,
        region: DeviceRegion,
        op: Op,
        chunk: Chunk,
        buffer: int,
        unbegun: set[int],
        lane: int,
        carry: Carry,
        landed: LandedSpans,
    ) -> str:
        unbegun.discard(buffer)
        host = self._buffers
        assert host is not None
        moves = [(here, buffer + at, length) for here, at, _, length in chunk.pieces]
        spans = [(buffer + at, there, length) for _, at, there, length in chunk.pieces]
        try:
            if op is Op.WRITE:
                await self._copied(region.device, region.device.copy_out(host, moves))
            done = await carry(host, spans)
            if op is Op.READ:
                await self._copied(region.device, region.device.copy_in(host, moves))
            landed.add((here, there, length) for here, _, there, length in chunk.pieces)
            return done.transport
        finally:
            self._free[lane].put_nowait(buffer)

    async def _copied(self, device: Device, copying: Copying) -> None:
        """Return or raise only after the copies have ended, also if cancelled. Raises TransferError."""
        if not copying.done():
            waiting = asyncio.get_running_loop().run_in_executor(self._threads, copying.wait)
            await ended({waiting})
        try:
            copying.wait()
        except Exception as error:
            raise TransferError(f"a copy from or to {device.location} failed: {error}") from None

    # --- ends

    async def fence(self, peer_id: str, timeout_s: float = 10.0) -> None:
        """See TransferEngine.fence."""
        await self._others.stop_serving(peer_id)
        await super().fence(peer_id, timeout_s)

    async def _fence_hosts(self, peer_id: str) -> None:
        await TransferEngine.fence(self, peer_id)

    async def close(self) -> None:
        """See TransferEngine.close."""
        await self._others.stop_serving()
        await super().close()
        for name in list(self._devices):
            self.unregister(name)
        if self._buffers is not None and not self._buffers.closed:
            super().unregister(STAGING)
            self._buffers.close()
        self._threads.shutdown(wait=True)
