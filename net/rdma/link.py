"""The submitting end of RDMA to one peer: queue pairs on every rail, slices striped over them, sent again on failure.

Beside the rails runs a TCP connection, on which the two sides agree about queue pairs and regions:

    connect{rails: [endpoint ...]} ──>  <── connected{rails: [endpoint | reason ...]}
    region{name} ──>                    <── region{name, address, nbytes, keys: [rkey ...]}  or  {name, reason}
    stop{rail} ──>                      <── stopped{rail}            its old queue pair takes nothing any more
    start{rail, endpoint} ──>           <── started{rail, endpoint}  or  {rail, reason}
                                        <── gone{region}             unregistered there

When a rail breaks, its slices go again on the others. The first try may still be on its way, and must not land in
memory that has been reused since: a WRITE that had to be sent again is complete only after the peer has confirmed
with `stopped` that the broken queue pair takes nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from net import rails
from net.connection import Connection
from net.errors import PeerLost, TransferError
from net.memory import Region
from net.rails import Rail
from net.rdma.device import Device
from net.rdma.job import Job, RemoteRegion, Slice
from net.rdma.questions import Questions
from net.rdma.queue_pair import NOTICE_BYTES, Endpoint, QueuePair, Request, VerbsError
from net.rdma.verbs import verbs
from net.spans import Span, check
from net.transport import Op, Unusable
from net.wire import Frame, Header, nowhere

CANCEL_S = 5.0  # for what a cancelled transfer has in the queues
WORD_BYTES = 8  # what an atomic works on


class Link:
    """A peer that this node reads from and writes to."""

    def __init__(self, connection: Connection, devices: Sequence[Device]) -> None:
        self.connection = connection
        self.rails = [Rail(device.name) for device in devices]
        self.ended = False
        self._devices = devices
        self._pairs: list[QueuePair] = []
        self._jobs: dict[Job, None] = {}  # oldest first
        self._regions: dict[str, RemoteRegion] = {}
        self._questions = Questions(connection)
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._scratch = Region.private(f"scratch of the link to {connection.peer_id}", NOTICE_BYTES)
        self._scratch_free = asyncio.Lock()
        self._listeners = [self._port_listener(index) for index in range(len(devices))]
        for device, listener in zip(devices, self._listeners, strict=True):
            device.on_port.append(listener)

    # --- opening

    async def open(self) -> str:
        """Connect every rail that both sides have; one line on the result. Raises Unusable, PeerLost."""
        try:
            self._pairs = [
                QueuePair(device, self._done_on(i), self._error_on(i)) for i, device in enumerate(self._devices)
            ]
        except VerbsError as error:
            raise Unusable(str(error)) from None
        ours = [pair.endpoint().to_json() for pair in self._pairs]
        answer = await self._questions.ask("connected", {"op": "connect", "rails": ours})
        reasons = []
        for index, theirs in enumerate(answer["rails"]):
            try:
                self._join(index, theirs)
            except (VerbsError, ValueError) as error:
                reasons.append(f"{self.rails[index].name}: {error}")
        if not any(rail.up for rail in self.rails):
            raise Unusable("; ".join(reasons) or "the peer has no rail for it")
        return "RDMA over " + ", ".join(rail.name for rail in self.rails if rail.up)

    def _join(self, index: int, theirs: Any) -> None:
        if isinstance(theirs, str):
            raise ValueError(theirs)
        self._pairs[index].connect(Endpoint.from_json(theirs))
        self.rails[index].opened()

    # --- submitting

    async def submit(self, op: Op, local: Region, remote: str, spans: Sequence[Span]) -> None:
        """See net.transport.Transport."""
        region = await self._region(remote)
        check([(offset, length) for _, offset, length in spans], remote, region.nbytes)
        opcode = verbs().lib.IBV_WR_RDMA_READ if op is Op.READ else verbs().lib.IBV_WR_RDMA_WRITE

        def make(index: int, piece: Slice) -> Request:
            here = self._devices[index].register(local)
            there, key = region.address + piece.remote, region.keys[index]
            return Request(opcode, here.address + piece.local, here.lkey, there, key, piece.length, piece)

        for device in self._devices:
            device.register(local)
        job = Job(op)
        job.add(spans, make)
        await self._run(job)

    async def notify(self, value: int, content: bytes = b"") -> None:
        """Tell the peer a number of 32 bits (a write with immediate data), or at most NOTICE_BYTES bytes (an inline
        send). It comes after everything that was complete before; on a rail that breaks it may come twice."""
        lib = verbs().lib
        if len(content) > NOTICE_BYTES:
            raise ValueError(f"a notice of {len(content)} bytes does not fit into {NOTICE_BYTES}")

        def make(index: int, piece: Slice) -> Request:
            self._scratch.memory[: len(content)] = content
            opcode = lib.IBV_WR_SEND if content else lib.IBV_WR_RDMA_WRITE_WITH_IMM
            return Request(
                *(opcode, self._scratch.address, 0, 0, 0, len(content), piece), immediate=value, inline=bool(content)
            )

        await self._alone(Job(Op.WRITE), make)

    async def fetch_add(self, remote: str, offset: int, add: int) -> int:
        """Add to the 64-bit word at `offset` of a region there, and return what it was. Atomic among network cards;
        the peer's own CPU must leave the word alone. Raises TransferError; also when it may have happened."""
        return await self._atomic(remote, offset, verbs().lib.IBV_WR_ATOMIC_FETCH_AND_ADD, add % 2**64, 0)

    async def compare_swap(self, remote: str, offset: int, expected: int, new: int) -> int:
        """Set the word to `new` if it is `expected`; returns what it was. See fetch_add."""
        return await self._atomic(remote, offset, verbs().lib.IBV_WR_ATOMIC_CMP_AND_SWP, expected, new)

    async def _atomic(self, remote: str, offset: int, opcode: int, add: int, swap: int) -> int:
        region = await self._region(remote)
        check([(offset, WORD_BYTES)], remote, region.nbytes)

        def make(index: int, piece: Slice) -> Request:
            here = self._devices[index].register(self._scratch)
            there, key = region.address + offset, region.keys[index]
            return Request(opcode, here.address, here.lkey, there, key, WORD_BYTES, piece, add=add, swap=swap)

        async with self._scratch_free:
            await self._alone(Job(Op.READ, once=True), make)
            return int.from_bytes(self._scratch.memory[:WORD_BYTES], "little")

    async def _alone(self, job: Job, make: Callable[[int, Slice], Request]) -> None:
        job.waiting.append(Slice(job, make))
        await self._run(job)

    async def _run(self, job: Job) -> None:
        self._jobs[job] = None
        try:
            self._pump()
            await job.done
        except asyncio.CancelledError:
            await self._settle(job)
            raise
        finally:
            self._jobs.pop(job, None)

    async def _settle(self, job: Job) -> None:
        """A job was given up: return when nothing of it moves any more."""
        job.waiting.clear()
        if job.idle or self.ended:
            return
        job.done = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CANCEL_S):
                with suppress(TransferError, PeerLost):  # which are ends too
                    await job.done
        except TimeoutError:
            for pair in self._pairs:
                pair.break_off("a cancelled transfer did not end")

    def _pump(self) -> None:
        """Post waiting slices, oldest job first, as the rails have room."""
        room = [pair.room for pair in self._pairs]
        batches: list[list[Slice]] = [[] for _ in self._pairs]
        now = time.monotonic()
        for job in self._jobs:
            while job.waiting:
                index = rails.choose(self.rails, job.waiting[0].length, room)
                if index is None:
                    break
                piece = job.posted()
                room[index] -= 1
                self.rails[index].sent(now, piece.length)
                batches[index].append(piece)
        for index, batch in enumerate(batches):
            if batch and self._pairs[index].ready:
                self._pairs[index].post([piece.make(index, piece) for piece in batch])
            elif batch:  # the rail broke while another batch was posted
                self._again(index, batch)

    # --- what the queue pairs say

    def _done_on(self, index: int) -> Callable[[list[Slice]], None]:
        def done(pieces: list[Slice]) -> None:
            now = time.monotonic()
            for piece in pieces:
                self.rails[index].arrived(now, piece.length)
                piece.job.arrived()
            self._pump()

        return done

    def _error_on(self, index: int) -> Callable[[list[Slice], str, bool], None]:
        def error(pieces: list[Slice], why: str, refused: bool) -> None:
            self.rails[index].failed(time.monotonic())
            if refused and pieces:
                # Its memory is not there any more: the fault of the transfer, so the rail comes back at once.
                self.rails[index].retry_at = 0.0
                pieces[0].job.fail(TransferError(f"the memory of a transfer was refused: {why}"))
            self._again(index, pieces)
            self._revive(index)
            self._pump()

        return error

    def _again(self, index: int, pieces: Sequence[Slice]) -> None:
        rail = self.rails[index]
        rail.resent += len(pieces)
        for piece in reversed(pieces):
            piece.job.came_back(piece, index, rail.name)
        for job in {piece.job for piece in pieces}:
            job.finish_if_idle()

    # --- broken rails

    def _port_listener(self, index: int) -> Callable[[bool], None]:
        def changed(active: bool) -> None:
            if self.ended or not self._pairs:
                return
            if active:
                self.rails[index].retry_at = 0.0
                self._revive(index)
            else:
                self._pairs[index].break_off(f"the link of {self.rails[index].name} went down")

        return changed

    def _revive(self, index: int) -> None:
        if not self.rails[index].up and index not in self._reviving and not self.ended:
            task = asyncio.get_running_loop().create_task(self._bring_back(index))
            self._reviving[index] = task
            task.add_done_callback(lambda _: self._reviving.pop(index, None))

    async def _bring_back(self, index: int) -> None:
        rail = self.rails[index]
        try:
            await self._questions.ask("stopped", {"op": "stop", "rail": index})
            for job in list(self._jobs):
                job.settled(index)
            while True:
                await asyncio.sleep(max(0.0, rail.retry_at - time.monotonic()))
                try:
                    await self._restart(index)
                    return
                except (VerbsError, ValueError, TimeoutError):
                    rail.postpone(time.monotonic())
        except PeerLost:
            return  # and with the connection this link
        except TimeoutError:
            self.connection.abort()
            self.end("it does not answer about a broken rail")

    async def _restart(self, index: int) -> None:
        """A new generation on both sides. Raises VerbsError, ValueError, TimeoutError, PeerLost."""
        pair = self._pairs[index]
        pair.reset()
        mine = {"op": "start", "rail": index, "endpoint": pair.endpoint().to_json()}
        answer = await self._questions.ask("started", mine)
        if not self._devices[index].active:
            raise ValueError("the link is down")
        self._join(index, answer.get("endpoint", answer.get("reason", "no endpoint")))
        self._pump()

    # --- the connection beside the rails

    async def _region(self, name: str) -> RemoteRegion:
        region = self._regions.get(name)
        if region is None:
            answer = await self._questions.ask("region", {"op": "region", "name": name})
            if "reason" in answer:
                raise TransferError(str(answer["reason"]))
            region = RemoteRegion(int(answer["address"]), int(answer["nbytes"]), list(answer["keys"]))
            self._regions[name] = region
        return region

    def place(self, connection: Connection, header: Header, nbytes: int) -> Sequence[memoryview]:
        return nowhere(nbytes)

    def frame(self, connection: Connection, frame: Frame) -> None:
        if frame.header["op"] == "gone":
            self._regions.pop(frame.header["region"], None)
        else:
            self._questions.answered(frame.header)

    def closed(self, connection: Connection, reason: str | None) -> None:
        self.end(reason or "it has closed")

    def end(self, reason: str) -> None:
        """Let go of the memory on this side and fail what is under way with PeerLost. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for task in list(self._reviving.values()):
            task.cancel()
        for pair in self._pairs:
            pair.close()
        for device, listener in zip(self._devices, self._listeners, strict=True):
            device.on_port.remove(listener)
            device.deregister(self._scratch.name)
        self._scratch.close()
        lost = PeerLost(f"lost {self.connection.peer_id!r} during a transfer: {reason}")
        for job in list(self._jobs):
            job.fail(lost)
        self._questions.end(lost)
